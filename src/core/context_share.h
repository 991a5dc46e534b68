// This rank's part of a micro-batch whose tokens several ranks share (train.context_parallel).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/context_layout.h"
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
  // Starts part [n] = this rank's part of the sum of all ranks' parts [N * n], likewise
  // (Communicator::reduce_scatter).
  virtual Event start_sum(Stream& s, const Buffer& part, const Buffer& parts) = 0;
  // What `s` is given from now on sees the result.
  virtual void await(Stream& s, const Event& started) = 0;
};

// A chunk that this rank holds.
struct ContextChunk {
  int place = 0;  // in the line
  // The document that goes on from earlier chunks, if there is one: its tokens here, which are the
  // first, and in earlier chunks.
  int64_t continued = 0;
  int64_t earlier = 0;
  // The documents, cut at the ends of the chunk: tokens and positions count from there.
  Sequences documents{};
};

// This rank's part of a micro-batch.
struct ContextShare {
  ContextRanks* ranks = nullptr;
  ContextLayout layout = ContextLayout::kConsecutive;
  int64_t tokens = 0;                  // T, of this rank
  std::vector<ContextChunk> chunks{};  // one, or two with ContextLayout::kFolded

  int64_t chunk_tokens() const { return tokens / chunks_of_rank(layout); }
  // The rank that holds the chunk of a place, and which one of its chunks that is.
  int rank_of(int place) const {
    return place < ranks->size() ? place : 2 * ranks->size() - 1 - place;
  }
  int chunk_of(int place) const { return place < ranks->size() ? 0 : 1; }
  // How many tokens of the chunk at `place`, an earlier one, `chunk` sees: its last ones.
  int64_t keys_of(const ContextChunk& chunk, int place) const {
    const int64_t nearer = (chunk.place - 1 - place) * chunk_tokens();
    return std::clamp<int64_t>(chunk.earlier - nearer, 0, chunk_tokens());
  }
};

}  // namespace sbtrain
