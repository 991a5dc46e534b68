// What a query sees: one type for all modules. Query j of a pack sees the keys
// [first_key(j), end_key(j)) of its own document. Neither bound ever decreases from one query to
// the next, so the first and the last query of a tile say which tiles of keys it has to visit and
// which of these need no mask. Tiles are aligned to the pack, not to its documents: the grid does
// not depend on the packing.
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/attention/rebased_index.h"
#include "kernels/primitives/accumulator.cuh"

namespace sbtrain::kernels {

// Kernels make one from their problem. Options that they leave at their defaults are constants to
// the compiler and cost nothing.
struct Visibility {
  int tokens = 0;
  const int32_t* positions = nullptr;   // [T], of each token in its document
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  int sequences = 0;
  int reach = INT_MAX;     // a query sees at most so many keys before its own
  bool own_chunk = false;  // only keys of the query's own chunk (rebased_index.h)
  bool own_key = true;     // a query sees its own key
  // Only keys that the forward pass read: from stop[stop_begin + query] of the document on.
  bool stopped = false;
  const int32_t* stop = nullptr;
  int64_t stop_begin = 0;
  // All keys are those of another rank, farther than the queries' own (ops/far_keys.h): each of the
  // queries before far_queries sees those from far_key on, and the others see none.
  // With a reach, row 0 of the keys lies far_distance tokens before row 0 of the queries.
  bool far = false;
  int far_queries = 0, far_key = 0, far_distance = 0;
  // If set, queries beyond the pack see nothing. Otherwise they see what the last query sees, and
  // none of their results may be written.
  bool ends_with_pack = false;

  __device__ __forceinline__ int first_key(int query, int position) const {
    return first_rebased_key(query, min(position, reach), own_chunk);
  }
  __device__ __forceinline__ int first_key(int query) const {
    if (far) {
      if (query >= far_queries) return INT_MAX;
      if (stopped) return far_key + stop[stop_begin + query];
      return reach == INT_MAX ? far_key : max(far_key, query + far_distance - reach);
    }
    if (ends_with_pack && query >= tokens) return INT_MAX;
    const int row = ends_with_pack ? query : min(query, tokens - 1);
    const int key = first_key(row, positions[row]);
    return stopped ? key + stop[stop_begin + row] : key;
  }
  __device__ __forceinline__ int end_key(int query) const {
    if (far) return tokens;
    const int end = query + (own_key ? 1 : 0);
    return ends_with_pack ? min(end, tokens) : end;
  }
  // All queries that see a key up to last_key come before this one.
  __device__ __forceinline__ int end_query(int last_key) const {
    if (far) {
      if (last_key < far_key) return 0;
      return reach == INT_MAX ? far_queries : min(far_queries, last_key + 1 + reach - far_distance);
    }
    int end = document_end(last_key);
    if (own_chunk) end = min(end, (last_key / kRebasedChunk + 1) * kRebasedChunk);
    return last_key + 1 + min(end - last_key - 1, reach);
  }

 private:
  // The end of the document of `token`.
  __device__ __forceinline__ int document_end(int token) const {
    int low = 0, high = sequences;  // cu_seqlens[low] <= token < cu_seqlens[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    return cu_seqlens[high];
  }
};

// The keys of a warp's first and last query.
struct WarpKeys {
  int first_begin, last_begin;
  int first_end, last_end;
  // Whether some query sees some of the keys [begin, begin + keys).
  __device__ __forceinline__ bool some(int begin, int keys) const {
    return begin < last_end && begin + keys > first_begin;
  }
  // Whether every query sees all of them.
  __device__ __forceinline__ bool all(int begin, int keys) const {
    return begin + keys <= first_end && begin >= last_begin;
  }
};

struct KeyRange {
  int begin, end;
};

// What the 16 * kRowBlocks queries of one warp see, with the bounds of the lane's rows in
// registers.
template <int kRowBlocks>
struct RowKeys : WarpKeys {
  int begin[2 * kRowBlocks], end[2 * kRowBlocks];
  __device__ __forceinline__ RowKeys(const Visibility& seen, int first_query) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int query = first_query + lane_row() + 8 * i;
      begin[i] = seen.first_key(query);
      end[i] = seen.end_key(query);
    }
    const int last_query = first_query + 16 * kRowBlocks - 1;
    first_begin = seen.first_key(first_query);
    last_begin = seen.first_key(last_query);
    first_end = seen.end_key(first_query);
    last_end = seen.end_key(last_query);
  }
  // The keys that the lane's row i sees.
  __device__ __forceinline__ KeyRange range(int i) const {
    return {begin[i], end[i]};
  }
  // Whether the lane's row i does not see the key.
  __device__ __forceinline__ bool hidden(int i, int key) const {
    return key < begin[i] || key >= end[i];
  }
};

// The same in few registers, of queries that see their own keys, or with kFar those of another
// rank: a lane holds one query's first key and gets those of its rows when a tile has to be masked.
template <int kRowBlocks, bool kFar = false>
struct LaneKeys : WarpKeys {
  static constexpr int kQueries = 16 * kRowBlocks;
  static_assert(kQueries <= 32);
  int first;  // query
  int key;    // first one of query first + lane % kQueries
  __device__ __forceinline__ LaneKeys(const Visibility& seen, int first_query)
      : first(first_query), key(seen.first_key(first + lane() % kQueries)) {
    first_begin = __shfl_sync(~0u, key, 0);
    last_begin = __shfl_sync(~0u, key, kQueries - 1);
    first_end = seen.end_key(first);
    last_end = seen.end_key(first + kQueries - 1);
  }
  // Scores of the keys from `begin` on become -inf where the query does not see the key.
  template <int kColBlocks>
  __device__ __forceinline__ void mask(Accumulator<kRowBlocks, kColBlocks>& s, int begin) const {
    if (all(begin, kColBlocks * 8)) return;
    int first_keys[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) first_keys[i] = of_lane_row(key, i);
    s.for_each([&](float& x, auto at) {
      const int last = kFar ? last_end - 1 : first + at.row;
      const int k = begin + at.col;
      if (k > last || k < first_keys[at.lane_row]) x = -INFINITY;
    });
  }
};

}  // namespace sbtrain::kernels
