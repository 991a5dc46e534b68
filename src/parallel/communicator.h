// Collective operations among the ranks of a run, or of a group of them.
//
// Every rank of the communicator makes the same calls in the same order, with the same types, sizes
// and roots; a rank that has no work makes them too. Errors and timeouts throw
// ExitCode::kCommunication; tensors that do not fit throw ExitCode::kInternal.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/stream.h"

namespace sbtrain {

enum class Collective : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kShift
};
const char* collective_name(Collective c);  // "all_gather", "reduce_scatter", ...

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // ---- On the device. These collectives are work of the stream, like ops: they see the results of
  // the work that it was given before, and its later work sees theirs. Tensors are contiguous. Sums
  // are of f32, bf16, f64, i32 or i64, in that type, and their order is the same in every run of
  // the same ranks on the same machines; data that is only moved may be of any type. A shard may
  // lie in `full`, as this rank's part of it; the caller must not let two arguments overlap
  // otherwise. On a stream that plans they are checked, and do nothing.

  // full [W * n] = the shards [n] of all ranks, in rank order.
  void all_gather(Stream& s, Tensor full, Tensor shard);
  // shard [n] = this rank's part of the sum of all ranks' full [W * n]. Destroys `full`.
  void reduce_scatter(Stream& s, Tensor shard, Tensor full);
  // to [W * n]: its r-th n elements = this rank's part of rank r's `from` [W * n], for every other
  // rank r. What stands in this rank's own place of `to` afterwards is undefined: that part lies in
  // `from`, and copying it would take multiprocessors where the others travel by copy engines. The
  // sum of all parts, in any order, is what reduce_scatter returns.
  void all_to_all(Stream& s, Tensor to, Tensor from);
  // to [n] = `from` [n] of the rank that is `step` places before this one in the ring of all ranks,
  // of which 0 follows the last: each sends to one rank and receives from one. A negative step
  // moves the other way. The two must not overlap.
  void shift(Stream& s, Tensor to, Tensor from, int step);
  // x = the sum of all ranks' x: the same bits on every rank.
  void all_reduce(Stream& s, Tensor x);
  // x = the root's x.
  void broadcast(Stream& s, Tensor x, int root);

  // Says that collectives will use this contiguous memory of the device again and again, so that
  // the library can prepare it. All ranks call it with the same size, and use the same places of it
  // in the same collective. The memory must stay while the handle exists. It changes no results,
  // and may do nothing.
  virtual std::shared_ptr<void> register_memory(const Tensor& /*memory*/) { return nullptr; }

  // ---- On the host. These return when the result is there, which is the same on every rank.

  virtual void sum(std::span<double> values) = 0;
  virtual std::string broadcast(std::string value, int root) = 0;
  virtual std::vector<std::string> all_gather(std::string value) = 0;  // in rank order
  // Returns when every rank has called it. Does not wait for streams.
  virtual void barrier() = 0;

  // ---- Groups

  // The group of the ranks that have this rank's color, in the order of their rank here.
  // Collective: all ranks call it with the same function, so that each knows the members of its
  // group. The node as color gives the ranks of a node, the rank in the node those that hold the
  // replicas of a shard on all nodes. Collectives of a group and of its parent may run at the same
  // time only if all ranks start them in the same order.
  using ColorOf = std::function<int(int rank)>;
  virtual std::unique_ptr<Communicator> split(const ColorOf& color_of) = 0;

 protected:
  // The arguments have been checked, and the stream does not only plan.
  virtual void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) = 0;
  virtual void run_reduce_scatter(Stream& s, const Tensor& shard, const Tensor& full) = 0;
  virtual void run_all_to_all(Stream& s, const Tensor& to, const Tensor& from) = 0;
  // `source` sends to this rank, and this rank to `target`; both may be this rank itself.
  struct Neighbours {
    int target = 0;
    int source = 0;
  };
  virtual void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours ring) = 0;
  virtual void run_all_reduce(Stream& s, const Tensor& x) = 0;
  virtual void run_broadcast(Stream& s, const Tensor& x, int root) = 0;
  // Instead of these, on a stream that plans: `whole` is what every rank of the group holds after a
  // gather, all-reduce or broadcast, and before a reduce-scatter or an all-to-all; of a shift it is
  // what one rank sends.
  virtual void plan(Collective /*collective*/, const Tensor& /*whole*/) {}
};

// A world of one rank, in which collectives only copy data.
std::unique_ptr<Communicator> make_single_process();

}  // namespace sbtrain
