// Based and ReBased forward: a tile of queries walks over its keys, pair by pair, with bf16 tensor
// core products; in the chunked form these are only the keys of its own chunk, and the state
// stands for earlier ones (rebased_state.cuh).
#pragma once

#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/rebased_state.cuh"

namespace sbtrain::kernels {

// Adds the contribution of the state that enters the chunk to the lane's part of o and den.
template <typename S>
__device__ __forceinline__ void add_earlier_keys(Accumulator<S::kRowBlocks, S::kE / 8>& o,
                                                 float (&den)[2 * S::kRowBlocks],
                                                 const RebasedLaunch& t,
                                                 const RebasedTiles<S>& tiles, int first,
                                                 int warp_row) {
  const RebasedPolynomial& s = t.p.s;
  const float* state = t.state(first / kRebasedChunk);
  const SeesState<S::kRowBlocks> sees(t, first + warp_row);
  const RowFeatures<S> q(tiles.features, warp_row, s.scale);
  for_each_slice<S>(tiles.slices, t, state, [&](int b, const float* slice, const float* last) {
    float factor[2 * S::kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
      factor[i] = sees.weight[i] * (b < t.p.features ? s.square * q.at(i, b) : s.linear);
    }
    add_values<S>(o, den, q, factor, slice, last);
  });
  add_constant<S>(o, den, sees.weight, t, state);
}

template <typename S>
static __global__ void __launch_bounds__(kRebasedThreads)
    rebased_forward_kernel(const RebasedLaunch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const RebasedTiles<S> tiles(memory);
  const Rebased& p = t.p;
  const PolynomialScore score = t.score();
  // The last queries see the most keys, so they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kRowBlocks;
  const int warp_first = first + warp_row;
  const Visibility visibility = t.visibility();
  const RowKeys<kRowBlocks> seen(visibility, warp_first);
  load_padded<S::kRows, S::kF, kRebasedThreads>(tiles.features, t.features(p.q, first), p.q.stride,
                                                p.tokens - first, p.features, t.f_width);
  Accumulator<kRowBlocks, S::kE / 8> o;
  o.clear();
  float den[2 * kRowBlocks] = {};  // this lane's part

  const int end = min(first + S::kRows, p.tokens);
  for (int key = visibility.first_key(first); key < end; key += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(tiles.inner_features, tiles.inner_values, t, p.k, p.v, key);
    __syncthreads();
    if (!seen.some(key, S::kInner)) continue;
    Accumulator<kRowBlocks, S::kInner / 8> s;
    padded_product<S::kF>(s, tiles.features, warp_row, tiles.inner_features);
    const bool all = seen.all(key, S::kInner);
    s.for_each([&](float& x, auto at) {
      x = score.weight(p.s.scale * x);
      if (!all && seen.hidden(at.lane_row, key + at.col)) x = 0.0f;
      x = to_float(__float2bfloat16_rn(x));  // as in the product: o is a mean, to the last bit
      den[at.lane_row] += x;
    });
    add_padded_product<S::kE>(o, s, tiles.inner_values);
  }

  // Rows after the first do not see the state if it does not.
  if (t.chunked() && sees_rebased_state(first, p.positions[first])) {
    add_earlier_keys<S>(o, den, t, tiles, first, warp_row);
  }

  const int rows = p.tokens - warp_first;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    den[i] = quad_sum(den[i]) + p.s.eps;
    const int row = lane_row() + i * 8;
    if (quad_lane() == 0 && row < rows) p.den[t.in_head(warp_first + row)] = den[i];
  }
  store_any_rows(t.values(p.o, warp_first), p.o.stride, rows, p.values, t.e_width > 1, o,
                 [&](int i) { return 1.0f / den[i]; });
}

}  // namespace sbtrain::kernels
