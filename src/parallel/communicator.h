// Collective operations among the ranks of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/stream.h"

namespace sbtrain {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // Device tensors, ordered on the stream. Errors and timeouts throw ExitCode::kCommunication.
  // full = the ranks' equal shards in rank order.
  virtual void all_gather(Stream& s, Tensor full, Tensor shard) = 0;
  // shard += this rank's part of the sum of all ranks' `full`.
  virtual void reduce_scatter(Stream& s, Tensor shard, Tensor full) = 0;
  // x (f64) = the sum of all ranks' x.
  virtual void all_reduce(Stream& s, Tensor x) = 0;

  // Host values, the same result on every rank.
  virtual void sum(std::span<double> values) = 0;
  virtual std::string broadcast(std::string value, int root) = 0;
  virtual void barrier() = 0;
};

// A world of one: every collective is the identity.
std::unique_ptr<Communicator> make_single_process();

}  // namespace sbtrain
