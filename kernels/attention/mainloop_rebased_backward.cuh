// Based and ReBased backward: P = s / den, dS = (do v^T - delta) / den slope(x), delta =
// rowsum(do o); dv = P^T do, dk = scale dS^T q, dq = scale dS k. One kernel for dq and one for dk
// and dv, each the only writer of its rows. In the chunked form states stand for the keys and
// queries of other chunks (rebased_state.cuh).
#pragma once

#include "kernels/attention/epilogue.cuh"
#include "kernels/attention/rebased_state.cuh"

namespace sbtrain::kernels {

// ---- delta --------------------------------------------------------------------------------------

// One thread for each token and head.
template <int kWidth>
static __global__ void __launch_bounds__(kRebasedThreads)
    rebased_delta_kernel(const RebasedLaunch t, float* delta_HT) {
  const int64_t i = int64_t{blockIdx.x} * kRebasedThreads + threadIdx.x;
  const Rebased& p = t.p;
  const int64_t token = i / p.heads;
  const int64_t head = i - token * p.heads;
  if (token >= p.tokens) return;
  const bf16* o = p.o.data + token * p.o.stride + head * p.values;
  const bf16* dout = p.dout.data + token * p.dout.stride + head * p.values;
  float sum = 0.0f;
#pragma unroll 2
  for (int c = 0; c < p.values; c += kWidth) {
    const auto a = load_floats<kWidth>(o + c);
    const auto b = load_floats<kWidth>(dout + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += a[j] * b[j];
  }
  delta_HT[head * p.tokens + token] = sum;
}

// ---- dq -----------------------------------------------------------------------------------------

// Computes dS from the products s = q k^T and ds = do v^T with the keys from `key` on, and 1 / den
// and delta of the lane's rows.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void to_query_gradients(Accumulator<kRowBlocks, kColBlocks>& s,
                                                   Accumulator<kRowBlocks, kColBlocks>& ds,
                                                   const PolynomialScore& score,
                                                   const RowKeys<kRowBlocks>& seen, int key,
                                                   const float (&inverse)[2 * kRowBlocks],
                                                   const float (&delta)[2 * kRowBlocks]) {
  const bool all = seen.all(key, 8 * kColBlocks);
  s.for_each([&](float& x, auto at) {
    x = score.slope(score.s.scale * x);
    if (!all && seen.hidden(at.lane_row, key + at.col)) x = 0.0f;
  });
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r * 2 + i / 2;
        ds.at[r][c][i] = s.at[r][c][i] * (ds.at[r][c][i] - delta[row]) * inverse[row];
      }
    }
  }
}

// dq += the contribution of the state that enters the chunk.
template <typename S>
__device__ __forceinline__ void add_earlier_keys(Accumulator<S::kRowBlocks, S::kF / 8>& dq,
                                                 const RebasedLaunch& t,
                                                 const RebasedTiles<S>& tiles, int first,
                                                 int warp_row,
                                                 const float (&inverse)[2 * S::kRowBlocks],
                                                 const float (&delta)[2 * S::kRowBlocks]) {
  const RebasedPolynomial& s = t.p.s;
  const SeesState<S::kRowBlocks> sees(t, first + warp_row);
  const RowFeatures<S> q(tiles.features, warp_row, s.scale);
  float minus_delta[2 * S::kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * S::kRowBlocks; ++i) minus_delta[i] = -delta[i];
  const auto add = [&](int b, const float* slice, const float* last) {
    float factor[2 * S::kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
      factor[i] = sees.weight[i] * inverse[i] *
                  (b < t.p.features ? 2.0f * s.square * q.at(i, b) : s.linear);
    }
    add_slopes<S>(dq, tiles.values + warp_row * S::kValueRow, minus_delta, factor, slice, last);
  };
  for_each_slice<S>(tiles.slices, t, t.state(first / kRebasedChunk), add);
}

template <typename S>
static __global__ void __launch_bounds__(kRebasedThreads)
    rebased_query_gradient_kernel(const RebasedLaunch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const RebasedTiles<S> tiles(memory);
  const Rebased& p = t.p;
  const PolynomialScore score = t.score();
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kRowBlocks;
  const int warp_first = first + warp_row;
  const Visibility visibility = t.visibility();
  const RowKeys<kRowBlocks> seen(visibility, warp_first);
  load_tokens<S, S::kRows>(tiles.features, tiles.values, t, p.q, p.dout, first);
  float inverse[2 * kRowBlocks], delta[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int64_t at = t.in_head(min(warp_first + lane_row() + i * 8, p.tokens - 1));
    inverse[i] = 1.0f / p.den[at];
    delta[i] = t.delta[at];
  }
  Accumulator<kRowBlocks, S::kF / 8> dq;
  dq.clear();

  const int end = min(first + S::kRows, p.tokens);
  for (int key = visibility.first_key(first); key < end; key += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(tiles.inner_features, tiles.inner_values, t, p.k, p.v, key);
    __syncthreads();
    if (!seen.some(key, S::kInner)) continue;
    Accumulator<kRowBlocks, S::kInner / 8> s, ds;
    padded_product<S::kF>(s, tiles.features, warp_row, tiles.inner_features);
    padded_product<S::kE>(ds, tiles.values, warp_row, tiles.inner_values);
    to_query_gradients(s, ds, score, seen, key, inverse, delta);
    add_padded_product<S::kF>(dq, ds, tiles.inner_features);
  }
  if (t.chunked() && sees_rebased_state(first, p.positions[first])) {
    add_earlier_keys<S>(dq, t, tiles, first, warp_row, inverse, delta);
  }
  store_any_rows(t.features(p.dq, warp_first), p.dq.stride, p.tokens - warp_first, p.features,
                 t.f_width > 1, dq, [&](int) { return p.s.scale; });
}

// ---- dk and dv ----------------------------------------------------------------------------------

// What the inner loop needs to know of each query: [kInner] in shared memory.
struct RebasedQueryValues {
  float* inverse;  // 1 / den, 0 beyond the pack
  float* delta;
  int* first_key;
};

// Loads the values of query `row`; called by one thread.
__device__ __forceinline__ void load_values(const RebasedQueryValues& to, int i,
                                            const RebasedLaunch& t, const Visibility& visibility,
                                            int row) {
  const int64_t at = t.in_head(min(row, t.p.tokens - 1));
  to.inverse[i] = row < t.p.tokens ? 1.0f / t.p.den[at] : 0.0f;
  to.delta[i] = t.delta[at];
  to.first_key[i] = visibility.first_key(row);
}

// The products s = k q^T become P^T and ds = v do^T become dS^T, of the warp's keys from
// `first_key` on and the queries from `query` on.
template <int kRowBlocks, int kColBlocks>
__device__ __forceinline__ void to_key_gradients(Accumulator<kRowBlocks, kColBlocks>& s,
                                                 Accumulator<kRowBlocks, kColBlocks>& ds,
                                                 const PolynomialScore& score,
                                                 const RebasedQueryValues& of, int first_key,
                                                 int query) {
#pragma unroll
  for (int c = 0; c < kColBlocks; ++c) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int i = c * 8 + lane_col() + odd;
      const float inverse = of.inverse[i];
      const float delta = of.delta[i];
      const int lowest = of.first_key[i];
#pragma unroll
      for (int r = 0; r < 2 * kRowBlocks; ++r) {
        const int key = first_key + lane_row() + r * 8;
        float& weight = s.at[r / 2][c][r % 2 * 2 + odd];
        float& slope = ds.at[r / 2][c][r % 2 * 2 + odd];
        const float x = score.s.scale * weight;
        const float factor = key <= query + i && key >= lowest ? inverse : 0.0f;
        weight = factor * score.weight(x);
        slope = factor * score.slope(x) * (slope - delta);
      }
    }
  }
}

// dk and dv += the contribution of the state of later queries, for keys from `first_in_state` on.
template <typename S>
__device__ __forceinline__ void add_later_queries(Accumulator<S::kRowBlocks, S::kF / 8>& dk,
                                                  Accumulator<S::kRowBlocks, S::kE / 8>& dv,
                                                  const RebasedLaunch& t,
                                                  const RebasedTiles<S>& tiles, int first,
                                                  int warp_row, int first_in_state) {
  const RebasedPolynomial& s = t.p.s;
  const float* state = t.state(first / kRebasedChunk);
  const RowFeatures<S> k(tiles.features, warp_row, 1.0f);
  float in_state[2 * S::kRowBlocks], ones[2 * S::kRowBlocks], unused[2 * S::kRowBlocks] = {};
#pragma unroll
  for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
    const int row = first + warp_row + lane_row() + i * 8;
    in_state[i] = row >= first_in_state ? 1.0f : 0.0f;
    ones[i] = 1.0f;
  }
  for_each_slice<S>(tiles.slices, t, state, [&](int b, const float* slice, const float* last) {
    float of_value[2 * S::kRowBlocks], of_slope[2 * S::kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
      const float square = b < t.p.features ? s.square * k.at(i, b) : 0.0f;
      const float linear = b < t.p.features ? 0.0f : s.linear;
      of_value[i] = in_state[i] * (square + linear);
      of_slope[i] = in_state[i] * (2.0f * square + linear);
    }
    add_values<S>(dv, unused, k, of_value, slice, last);
    add_slopes<S>(dk, tiles.values + warp_row * S::kValueRow, ones, of_slope, slice, last);
  });
  add_constant<S>(dv, unused, in_state, t, state);
}

template <typename S>
static __global__ void __launch_bounds__(kRebasedThreads)
    rebased_key_gradient_kernel(const RebasedLaunch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const RebasedTiles<S> tiles(memory);
  const RebasedQueryValues of = {tiles.numbers, tiles.numbers + S::kInner,
                                 reinterpret_cast<int*>(tiles.numbers + 2 * S::kInner)};
  const Rebased& p = t.p;
  const PolynomialScore score = t.score();
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * S::kRows;
  const int warp_row = thread / 32 * 16 * kRowBlocks;
  const int warp_first = first + warp_row;
  const Visibility visibility = t.visibility();
  load_tokens<S, S::kRows>(tiles.features, tiles.values, t, p.k, p.v, first);
  Accumulator<kRowBlocks, S::kF / 8> dk;
  Accumulator<kRowBlocks, S::kE / 8> dv;
  dk.clear();
  dv.clear();

  const int end = visibility.end_query(min(first + S::kRows, p.tokens) - 1);
  for (int query = first; query < end; query += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(tiles.inner_features, tiles.inner_values, t, p.q, p.dout, query);
    if (thread < S::kInner) load_values(of, thread, t, visibility, query + thread);
    __syncthreads();
    // First keys never decrease.
    if (query + S::kInner <= warp_first || of.first_key[0] >= warp_first + 16 * kRowBlocks) {
      continue;
    }
    Accumulator<kRowBlocks, S::kInner / 8> s, ds;
    padded_product<S::kF>(s, tiles.features, warp_row, tiles.inner_features);
    padded_product<S::kE>(ds, tiles.values, warp_row, tiles.inner_values);
    to_key_gradients(s, ds, score, of, warp_first, query);
    add_padded_product<S::kE>(dv, s, tiles.inner_values);
    add_padded_product<S::kF>(dk, ds, tiles.inner_features);
  }
  dk.for_each([&](float& x, auto) { x *= p.s.scale; });

  // Queries of later chunks. Of this block's keys the last are part of the state, if any are.
  const int chunk_end = min((first / kRebasedChunk + 1) * kRebasedChunk, p.tokens);
  const int first_in_state = first_in_rebased_state(chunk_end - 1, p.positions[chunk_end - 1]);
  if (t.chunked() && first + S::kRows > first_in_state) {
    add_later_queries<S>(dk, dv, t, tiles, first, warp_row, first_in_state);
  }
  const int rows = p.tokens - warp_first;
  const auto one = [](int) { return 1.0f; };
  store_any_rows(t.features(p.dk, warp_first), p.dk.stride, rows, p.features, t.f_width > 1, dk,
                 one);
  store_any_rows(t.values(p.dv, warp_first), p.dv.stride, rows, p.values, t.e_width > 1, dv, one);
}

}  // namespace sbtrain::kernels
