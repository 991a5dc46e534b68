// What the ranks of a job tell each other on the host: small texts, and word of ranks that fail.
//
// The device's collectives (parallel/communicator.h) move tensors and cannot say that a rank is
// gone; this channel can. It has a thread of its own, so it answers while the device or the disk is
// busy. Every member function may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sbtrain {

struct Launch;

// Why a job ends: the code that all its ranks exit with, and the message that is shown once.
struct JobFailure {
  ExitCode code = ExitCode::kCommunication;
  std::string message;  // names the rank that failed, unless that is rank 0
};

class Control {
 public:
  virtual ~Control() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // The largest text of one rank in an exchange, in bytes.
  static constexpr size_t kLargestText = size_t{16} << 20;

  // The texts of the ranks in `members` (ascending; they include this one), in that order, the same
  // on every one of them. Every member calls it; it returns after all have. Calls of one `topic`
  // with the same members are matched in the order in which they are made, and topics are
  // independent of each other, so a save in the background exchanges beside training. Throws the
  // job's failure. There is no deadline of its own, since others may rightly be busy for long: a
  // member that has ended, is gone or makes no progress fails the job.
  virtual std::vector<std::string> exchange(std::string_view topic, std::span<const int> members,
                                            std::string value) = 0;

  // Says what this rank has begun ("step 120", "validation", "saving"): the sign of life that the
  // deadline for progress counts from, and what messages name. It costs a copy of the text.
  // What may take longer than the deadline says how long at most (`allowance`). The deadline does
  // not end the job meanwhile, whichever rank is late, because the others wait for this one. The
  // allowance ends with the next call.
  virtual void progress(std::string_view what, std::chrono::milliseconds allowance = {}) = 0;

  // Says what this rank waits for ("all_gather of block 3"), for messages; empty: for nothing. It
  // is no sign of life.
  virtual void waits_for(std::string_view what) = 0;

  // This rank ends for `failure`: the others end with the same code. Returns when rank 0 knows, or
  // cannot be told. Does nothing if the job has failed already.
  virtual void report(const JobFailure& failure) = 0;

  // `abort` is called once, from another thread, when the job must end: a rank has reported a
  // failure (this one included), is gone, or has made no progress for too long. It frees whatever
  // this rank waits for (an NCCL kernel, an MPI request). Afterwards check() throws. If the job has
  // failed already, it is called before on_failure returns. Once the last copy of the returned
  // handle is gone, it will not be called any more and does not run; `abort` itself must not drop
  // the handle, nor wait for a thread that does.
  using FailureHandle = std::shared_ptr<void>;
  [[nodiscard]] virtual FailureHandle on_failure(std::function<void(const JobFailure&)> abort) = 0;

  // Throws the job's failure once there is one.
  virtual void check() const = 0;
  virtual std::optional<JobFailure> failure() const = 0;

  // Whether this rank is the one that shows the job's failure to the user: rank 0, or another that
  // cannot reach it.
  virtual bool shows_failure() const = 0;

  // This rank is done. Returns when all are; throws the job's failure. A rank whose Control is
  // destroyed without it counts as gone. Calls after the first do nothing.
  virtual void finish() = 0;
};

// A job of one rank.
std::unique_ptr<Control> make_single_control();

// 0, 1, ... world - 1: the members of an exchange among all ranks.
std::vector<int> all_ranks(int world);

// How long ranks wait for each other.
struct Deadlines {
  std::chrono::milliseconds rendezvous = std::chrono::seconds(300);
  // Without progress, or without any answer of a rank, until the job ends (train.timeout).
  std::chrono::milliseconds progress = std::chrono::seconds(120);
  // The interval between two signs of life of a rank's own thread.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(1);
  // Whether this rank has been asked to stop, which ends a job whose ranks are not all there yet
  // with ExitCode::kPreempted. Called from any thread.
  bool (*stopped)() = nullptr;
};

// Joins the job that `launch` describes, by TCP to rank 0, and returns when all ranks are there, or
// when the job has failed meanwhile: check() then throws, with the ranks that did not come in time
// or what this rank could not reach. Processes that do not know the job's secret cannot join,
// whatever they send. A job that is stopped as a whole (SIGSTOP of all ranks) goes on when it is
// continued: deadlines count only time during which the thread that watches them could run.
std::unique_ptr<Control> make_control(const Launch& launch, const Deadlines& deadlines = {});

}  // namespace sbtrain
