// Products with the state of earlier keys (rebased_index.h), or in the backward pass of later
// queries, on tf32 tensor cores; left operands are formed in registers. With S symmetric in the
// features a and b,
//   sum_i s_ij [v_i | 1] += sum_b square q_b (sum_a q_a S_ab) + linear sum_a q_a S_a + constant S_1
//   dq_a += scale (sum_b 2 square q_b (g S_ab) + linear g S_a),   q = scale q_j,
//   g_j = (do_j, -do_j.o_j) / den_j
// and s is symmetric in q and k: dv and dk are the same two sums over the state of queries
// sum_j (products of q) g_j, formed from right to left.
#pragma once

#include "kernels/attention/rebased_tiles.cuh"

namespace sbtrain::kernels {

// kSlices slices b = first, ...: [a, column] of S_ab as tf32, and after them [a] of the last
// column as f32. Slice f is that of the linear term; beyond, zeros.
template <typename S>
__device__ void load_slices(float* slices, const RebasedLaunch& t, const float* state, int first) {
  const int f = t.p.features;
  const int width = t.width();
  const auto row_of = [&](int i) {  // of the state, or -1
    const int a = i % S::kF;
    const int b = first + i / S::kF;
    if (a >= f || b > f || (b == f && !t.lower)) return -1;
    return b == f ? 1 + a : rebased_row(f, t.lower, a, b);
  };
#pragma unroll 4
  for (int n = static_cast<int>(threadIdx.x); n < S::kSlices * S::kF * S::kE;
       n += kRebasedThreads) {
    const int i = n / S::kE;
    const int c = n % S::kE;
    const int row = row_of(i);
    const float value = row >= 0 && c < t.p.values ? state[row * width + c] : 0.0f;
    slices[i * S::kValueStride + c] = __uint_as_float(to_tf32(value));
  }
  float* last = slices + S::kSlices * S::kF * S::kValueStride;
  for (int i = static_cast<int>(threadIdx.x); i < S::kSlices * S::kF; i += kRebasedThreads) {
    const int row = row_of(i);
    last[i] = row >= 0 ? state[row * width + width - 1] : 0.0f;
  }
}

// Calls use(b, slice, last) for every slice of the state. All threads of the block take part.
template <typename S, typename Use>
__device__ __forceinline__ void for_each_slice(float* slices, const RebasedLaunch& t,
                                               const float* state, Use&& use) {
  const int count = t.p.features + (t.lower ? 1 : 0);
  for (int first = 0; first < count; first += S::kSlices) {
    __syncthreads();
    load_slices<S>(slices, t, state, first);
    __syncthreads();
    for (int i = 0; i < min(S::kSlices, count - first); ++i) {
      use(first + i, slices + i * S::kF * S::kValueStride,
          slices + S::kSlices * S::kF * S::kValueStride + i * S::kF);
    }
  }
}

// The features x of the lane's rows: those in its fragments, and any other by index.
template <typename S>
struct RowFeatures {
  __device__ RowFeatures(const bf16* tile, int warp_row, float scale)
      : first(tile + (warp_row + lane_row()) * S::kFeatureRow), scale(scale) {
#pragma unroll
    for (int r = 0; r < S::kRowBlocks; ++r) {
#pragma unroll
      for (int k = 0; k < S::kF / 8; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          fragment[r][k][i] = at(r * 2 + i % 2, k * 8 + quad_lane() + i / 2 * 4);
        }
      }
    }
  }
  __device__ __forceinline__ float at(int lane_row, int feature) const {
    return scale * to_float(first[lane_row * 8 * S::kFeatureRow + feature]);
  }
  const bf16* first;
  float scale;
  float fragment[S::kRowBlocks][S::kF / 8][4];
};

// y += sum_a factor x_a slice[a, :]; factor for each of the lane's rows. sum += the same of `last`,
// this lane's part of what the quad adds up to.
template <typename S>
__device__ __forceinline__ void add_values(Accumulator<S::kRowBlocks, S::kE / 8>& y,
                                           float (&sum)[2 * S::kRowBlocks], const RowFeatures<S>& x,
                                           const float (&factor)[2 * S::kRowBlocks],
                                           const float* slice, const float* last) {
  const int c = quad_lane();
#pragma unroll
  for (int k = 0; k < S::kF / 8; ++k) {
    uint32_t a[S::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < S::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = factor[r * 2 + i % 2] * x.fragment[r][k][i];
        sum[r * 2 + i % 2] += value * last[k * 8 + c + i / 2 * 4];
        a[r][i] = to_tf32(value);
      }
    }
    const float* b = slice + (k * 8 + c) * S::kValueStride + lane_row();
#pragma unroll
    for (int n = 0; n < S::kE / 8; ++n) {
      const uint32_t b0 = __float_as_uint(b[n * 8]);
      const uint32_t b1 = __float_as_uint(b[n * 8 + 4 * S::kValueStride]);
#pragma unroll
      for (int r = 0; r < S::kRowBlocks; ++r) mma_m16n8k8_tf32(y.at[r][n], a[r], b0, b1);
    }
  }
}

// dx_a += factor (u, last_u).(slice[a, :], last[a]), u the lane's rows of a tile of values.
template <typename S>
__device__ __forceinline__ void add_slopes(Accumulator<S::kRowBlocks, S::kF / 8>& dx, const bf16* u,
                                           const float (&last_u)[2 * S::kRowBlocks],
                                           const float (&factor)[2 * S::kRowBlocks],
                                           const float* slice, const float* last) {
  const int c = quad_lane();
  const auto add = [&](const uint32_t(&a)[S::kRowBlocks][4], int n, uint32_t b0, uint32_t b1) {
#pragma unroll
    for (int r = 0; r < S::kRowBlocks; ++r) mma_m16n8k8_tf32(dx.at[r][n], a[r], b0, b1);
  };
#pragma unroll
  for (int k = 0; k < S::kE / 8; ++k) {
    uint32_t a[S::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < S::kRowBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_row() + r * 16 + i % 2 * 8;
        const float value = to_float(u[row * S::kValueRow + k * 8 + c + i / 2 * 4]);
        a[r][i] = to_tf32(factor[r * 2 + i % 2] * value);
      }
    }
#pragma unroll
    for (int n = 0; n < S::kF / 8; ++n) {
      const float* b = slice + (n * 8 + lane_row()) * S::kValueStride + k * 8 + c;
      add(a, n, __float_as_uint(b[0]), __float_as_uint(b[4]));
    }
  }
  // The last column: a product of which all but the first of the 8 inner columns is zero.
  uint32_t a[S::kRowBlocks][4] = {};
#pragma unroll
  for (int r = 0; r < S::kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[r][i] = c == 0 ? to_tf32(factor[r * 2 + i] * last_u[r * 2 + i]) : 0u;
    }
  }
#pragma unroll
  for (int n = 0; n < S::kF / 8; ++n) {
    add(a, n, c == 0 ? to_tf32(last[n * 8 + lane_row()]) : 0u, 0u);
  }
}

// y += weight constant S_1, the state's first row; sum likewise, in one lane of the quad.
template <typename S>
__device__ __forceinline__ void add_constant(Accumulator<S::kRowBlocks, S::kE / 8>& y,
                                             float (&sum)[2 * S::kRowBlocks],
                                             const float (&weight)[2 * S::kRowBlocks],
                                             const RebasedLaunch& t, const float* state) {
  if (!t.lower) return;
  y.for_each([&](float& value, auto at) {
    if (at.col < t.p.values) value += weight[at.lane_row] * t.p.s.constant * state[at.col];
  });
  if (quad_lane() != 0) return;
#pragma unroll
  for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
    sum[i] += weight[i] * t.p.s.constant * state[t.p.values];
  }
}

// 1 for the lane's rows that see the state which enters their chunk, 0 for others and beyond the
// pack.
template <int kRowBlocks>
struct SeesState {
  __device__ SeesState(const RebasedLaunch& t, int first_query) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = first_query + lane_row() + i * 8;
      const bool sees = row < t.p.tokens && sees_rebased_state(row, t.p.positions[row]);
      weight[i] = sees ? 1.0f : 0.0f;
    }
  }
  float weight[2 * kRowBlocks];
};

}  // namespace sbtrain::kernels
