// What the main loops of Based and ReBased share: their view of the problem, their shapes and
// tiles.
#pragma once

#include "kernels/attention/padded_tile.cuh"
#include "kernels/attention/rebased.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/attention/score_polynomial.cuh"
#include "kernels/attention/visibility.cuh"
#include "kernels/launch.h"

namespace sbtrain::kernels {

inline constexpr int kRebasedWarps = 4;
inline constexpr int kRebasedThreads = 32 * kRebasedWarps;

// Which side of the pairs a state sums over.
enum class RebasedSide : uint8_t { kKeys, kQueries };

// The problem, and what else the kernels need to know.
struct RebasedLaunch {
  Rebased p;             // of the heads of this launch
  float* states;         // [chunks, heads, rows, values + 1], null: over all pairs
  const float* delta;    // backward: do.o [H, T]
  int f_width, e_width;  // elements that features and values are read by, see load_padded
  bool lower;            // the state has rows for the lower terms

  __device__ bool chunked() const { return states != nullptr; }
  __device__ int rows() const { return rebased_rows(p.features, lower); }
  __device__ int width() const { return p.values + 1; }
  __device__ const float* state(int chunk) const {
    return states + (int64_t{chunk} * p.heads + blockIdx.y) * rows() * width();
  }
  __device__ bf16* features(const RebasedTensor& x, int row) const {
    return x.data + row * x.stride + static_cast<int>(blockIdx.y) * p.features;
  }
  __device__ bf16* values(const RebasedTensor& x, int row) const {
    return x.data + row * x.stride + static_cast<int>(blockIdx.y) * p.values;
  }
  __device__ int64_t in_head(int row) const { return int64_t{blockIdx.y} * p.tokens + row; }
  __device__ PolynomialScore score() const { return {p.s}; }
  __device__ Visibility visibility() const {
    return {.tokens = p.tokens,
            .positions = p.positions,
            .cu_seqlens = p.cu_seqlens,
            .sequences = p.sequences,
            .own_chunk = chunked()};
  }
};

template <int kFeatures, int kValues>
struct RebasedShape {
  static constexpr int kF = kFeatures;
  static constexpr int kE = kValues;
  static constexpr int kRowBlocks = kE == 128 || kF == 32 ? 1 : 2;  // of 16 rows, each warp
  static constexpr int kRows = 16 * kRowBlocks * kRebasedWarps;     // of a block: divides a chunk
  static constexpr int kInner = 32;                                 // tokens of the inner loop
  static constexpr int kSlices = std::max(1, 4096 / (kF * kE));     // of a state, at a time
  static constexpr int kValueStride = kE + 8;                       // of a slice
  static constexpr int kSliceFloats = kSlices * kF * (kValueStride + 1);
  static constexpr int kFeatureRow = kPaddedStride<kF>;
  static constexpr int kValueRow = kPaddedStride<kE>;
  // Two tiles of a block's rows, two of the inner loop, three numbers for each token of the inner
  // loop, slices: what the largest kernel takes.
  static constexpr int kSharedBytes =
      2 * (kRows + kInner) * (kFeatureRow + kValueRow) + 4 * (3 * kInner + kSliceFloats);
  static_assert(kRebasedChunk % kRows == 0 && kRows % kInner == 0);
};

template <typename S>
struct RebasedTiles {
  __device__ explicit RebasedTiles(bf16* memory)
      : features(memory),
        values(features + S::kRows * S::kFeatureRow),
        inner_features(values + S::kRows * S::kValueRow),
        inner_values(inner_features + S::kInner * S::kFeatureRow),
        numbers(reinterpret_cast<float*>(inner_values + S::kInner * S::kValueRow)),
        slices(numbers + 3 * S::kInner) {}
  bf16 *features, *values;              // of the block's rows
  bf16 *inner_features, *inner_values;  // of the inner loop's tokens
  float *numbers, *slices;
};

// Copies tokens from `row` on to two tiles of kRows: their features from x and their values
// from y.
template <typename S, int kRows>
__device__ __forceinline__ void load_tokens(bf16* features, bf16* values, const RebasedLaunch& t,
                                            const RebasedTensor& x, const RebasedTensor& y,
                                            int row) {
  const Rebased& p = t.p;
  load_padded<kRows, S::kF, kRebasedThreads>(features, t.features(x, row), x.stride, p.tokens - row,
                                             p.features, t.f_width);
  load_padded<kRows, S::kE, kRebasedThreads>(values, t.values(y, row), y.stride, p.tokens - row,
                                             p.values, t.e_width);
}

}  // namespace sbtrain::kernels
