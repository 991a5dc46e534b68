// This rank's part of a micro-batch whose tokens several ranks share (train.context_parallel).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/memory.h"
#include "core/sequences.h"
#include "core/stream.h"

namespace sbtrain {

// The ranks that share the tokens of a micro-batch, as attention sees them; parallel/context_ring.h
// has them.
class ContextRanks {
 public:
  virtual ~ContextRanks() = default;
  virtual int place() const = 0;  // of this rank, 0 <= place < size
  virtual int size() const = 0;   // N
  // Starts to = `from` of the rank `step` places before this one (Communicator::shift), beside what
  // `s` is given from now on. Both stay until await() has been called with what this returns.
  virtual Event start_shift(Stream& s, const Buffer& to, const Buffer& from, int step) = 0;
  // What `s` is given from now on sees the result.
  virtual void await(Stream& s, const Event& shifted) = 0;
};

// This rank's part of a micro-batch.
struct ContextShare {
  ContextRanks* ranks = nullptr;
  int64_t tokens = 0;  // T
  // The document that goes on from earlier ranks, if there is one: its tokens here, which are the
  // first, and on earlier ranks.
  int64_t continued = 0;
  int64_t earlier = 0;
  // i32 [T]: 0, 1, 2, ... within each document that is cut at the ends of this part.
  Tensor cut_positions_T{};
  // How many tokens of rank `rank`, which is an earlier one, these tokens see: its last ones.
  int64_t keys_of(int rank) const {
    const int64_t nearer = (ranks->place() - 1 - rank) * tokens;
    return std::clamp<int64_t>(earlier - nearer, 0, tokens);
  }
};

// The place of each token in the document of cu_seqlens that it belongs to.
inline const Tensor& local_positions(const Sequences& sequences) {
  return sequences.context ? sequences.context->cut_positions_T : sequences.positions_T;
}

}  // namespace sbtrain
