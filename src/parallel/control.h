// What the ranks of a job tell each other on the host: small texts, and word of ranks that fail.
//
// The device's collectives (parallel/communicator.h) move tensors and cannot say that a rank is
// gone; this channel can. It has a thread of its own, so it answers while the device or the disk is
// busy.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sbtrain {

// Why a job ends: the code that all its ranks exit with, and the message that is shown once.
struct JobFailure {
  ExitCode code = ExitCode::kCommunication;
  std::string message;
};

class Control {
 public:
  virtual ~Control() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // The texts of the ranks in `members` (ascending; they include this one), in that order, the same
  // on every one of them. Every member calls it; it returns after all have. Calls of one `topic`
  // are matched in the order in which they are made, and topics are independent of each other, so a
  // save in the background exchanges beside training. Throws the job's failure, or
  // ExitCode::kCommunication naming the ranks that did not come in time.
  virtual std::vector<std::string> exchange(std::string_view topic, std::span<const int> members,
                                            std::string value) = 0;

  // Says what this rank has begun ("step 120", "validation", "saving"): the sign of life that the
  // deadline for progress counts from, and what the other ranks' messages name.
  virtual void progress(std::string_view what) = 0;

  // This rank ends for `failure`: the others end with the same code.
  virtual void report(const JobFailure& failure) = 0;

  // `abort` is called once, from another thread, when the job must end: another rank has reported a
  // failure, is gone, or has made no progress for too long. It frees whatever this rank waits for
  // (an NCCL kernel, an MPI request). Afterwards check() throws.
  virtual void on_failure(std::function<void(const JobFailure&)> abort) = 0;

  // Throws the job's failure once there is one.
  virtual void check() const = 0;
};

// A job of one rank.
std::unique_ptr<Control> make_single_control();

}  // namespace sbtrain
