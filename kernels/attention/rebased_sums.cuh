// Forms the states of Based and ReBased (rebased_index.h): sums over the tokens of each chunk, then
// a scan over the chunks. rebased_state.cu launches these kernels.
#pragma once

#include "kernels/attention/rebased_tiles.cuh"

namespace sbtrain::kernels {

template <int kF, int kE>
struct RebasedSumShape {
  static constexpr int kTokenStride = kRebasedChunk + 4;  // of the features, transposed
  static constexpr int kSharedBytes =
      2 * kRebasedChunk * kPaddedStride<kE> + 4 * ((kF + 1) * kTokenStride + 2 * kRebasedChunk);
};

// A chunk of tokens in shared memory: their values or gradients u and, transposed, their features
// x, the last one being 1; their weights and the last column that belongs to u.
template <int kF, int kE>
struct RebasedChunkTile {
  static constexpr int kTokenStride = RebasedSumShape<kF, kE>::kTokenStride;
  __device__ __forceinline__ explicit RebasedChunkTile(bf16* memory)
      : u(memory),
        x(reinterpret_cast<float*>(u + kRebasedChunk * kPaddedStride<kE>)),
        weights(x + (kF + 1) * kTokenStride),
        last_u(weights + kRebasedChunk) {}
  // Where the features of index a lie; f is the constant 1.
  __device__ __forceinline__ const float* feature(int a, int f) const {
    return x + (a == f ? kF : a) * kTokenStride;
  }
  bf16* u;                      // [chunk, kE]
  float *x, *weights, *last_u;  // [kF + 1, chunk], [chunk], [chunk]
};

template <int kF, int kE>
__device__ __forceinline__ void load_chunk(const RebasedChunkTile<kF, kE>& tile,
                                           const RebasedLaunch& t, RebasedSide side, int first,
                                           int count) {
  const bool of_keys = side == RebasedSide::kKeys;
  constexpr int kTokenStride = RebasedChunkTile<kF, kE>::kTokenStride;
  const int thread = static_cast<int>(threadIdx.x);
  const Rebased& p = t.p;
  const RebasedTensor u = of_keys ? p.v : p.dout;
  const RebasedTensor x = of_keys ? p.k : p.q;
  load_padded<kRebasedChunk, kE, kRebasedThreads>(tile.u, t.values(u, first), u.stride, count,
                                                  p.values, t.e_width);
  const bf16* const features = t.features(x, first);
  const float scale = of_keys ? 1.0f : p.s.scale;
#pragma unroll 4
  for (int i = thread; i < kRebasedChunk * kF; i += kRebasedThreads) {
    const int token = i / kF;
    const int a = i % kF;
    const bool valid = token < count && a < p.features;
    tile.x[a * kTokenStride + token] =
        valid ? scale * to_float(features[token * x.stride + a]) : 0.0f;
  }
  for (int i = thread; i < kRebasedChunk; i += kRebasedThreads) {
    tile.x[kF * kTokenStride + i] = 1.0f;
    const int token = first + i;
    float weight = 0.0f;
    float last = 0.0f;
    if (i < count) {
      const int end = first + count - 1;
      if (of_keys) {  // without positions all tokens are of one document
        weight = p.positions == nullptr || token >= first_in_rebased_state(end, p.positions[end])
                     ? 1.0f
                     : 0.0f;
        last = 1.0f;
      } else {
        if (sees_rebased_state(token, p.positions[token])) weight = 1.0f / p.den[t.in_head(token)];
        last = -t.delta[t.in_head(token)];
      }
    }
    tile.weights[i] = weight;
    tile.last_u[i] = last;
  }
}

// Rows [begin, begin + 16) of the state of one chunk, by one warp.
template <int kF, int kE>
__device__ __forceinline__ void sum_rows(float* out, const RebasedChunkTile<kF, kE>& tile,
                                         const RebasedLaunch& t, int begin, int rows, int width) {
  const Rebased& p = t.p;
  const int f = p.features;
  const int c = quad_lane();
  const float* factors[2][2];  // of the lane's two rows
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RebasedFactors of =
        rebased_factors(f, t.lower, min(begin + lane_row() + i * 8, rows - 1));
    factors[i][0] = tile.feature(of.a, f);
    factors[i][1] = tile.feature(of.b, f);
  }
  Accumulator<1, kE / 8> sums;
  sums.clear();
  float last_sum[2] = {};
  for (int token = c; token < kRebasedChunk; token += 8) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + i / 2 * 4;
      const float value = factors[i % 2][0][at] * factors[i % 2][1][at] * tile.weights[at];
      last_sum[i % 2] += value * tile.last_u[at];
      a[i] = to_tf32(value);
    }
    const bf16* b = tile.u + token * kPaddedStride<kE> + lane_row();
#pragma unroll
    for (int n = 0; n < kE / 8; ++n) {
      mma_m16n8k8_tf32(sums.at[0][n], a, __float_as_uint(to_float(b[n * 8])),
                       __float_as_uint(to_float(b[n * 8 + 4 * kPaddedStride<kE>])));
    }
  }
  sums.for_each([&](float value, auto at) {
    if (begin + at.row < rows && at.col < p.values) {
      out[int64_t{begin + at.row} * width + at.col] = value;
    }
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = quad_sum(last_sum[i]);
    const int row = begin + lane_row() + i * 8;
    if (c == 0 && row < rows) out[int64_t{row} * width + p.values] = sum;
  }
}

// states[chunk] = sum over the tokens of the chunk that take part of (products of features) [v | 1]
// or, of queries, of scale q and g. One block for each chunk and head.
template <int kF, int kE>
static __global__ void __launch_bounds__(kRebasedThreads)
    rebased_sum_kernel(const RebasedLaunch t, RebasedSide side) {
  extern __shared__ __align__(128) bf16 shared[];
  const RebasedChunkTile<kF, kE> tile(shared);
  const int first = static_cast<int>(blockIdx.x) * kRebasedChunk;
  load_chunk(tile, t, side, first, min(kRebasedChunk, t.p.tokens - first));
  __syncthreads();

  const int rows = t.rows();
  const int width = t.width();
  float* const out =
      t.states + (int64_t{blockIdx.x} * t.p.heads + blockIdx.y) * int64_t{rows} * width;
  for (int begin = static_cast<int>(threadIdx.x) / 32 * 16; begin < rows;
       begin += 16 * kRebasedWarps) {
    sum_rows(out, tile, t, begin, rows, width);
  }
}

inline constexpr int kScanThreads = 256;
inline constexpr int kScanBatch = 8;  // loads in flight

// Turns the sums of chunks into the states that enter the chunks, going from left to right; with
// `reverse` into the states that leave them, going from right to left. One thread for each of the
// `elements` of the states of one chunk.
static __global__ void __launch_bounds__(kScanThreads)
    rebased_scan_kernel(float* states, int64_t elements, int tokens, const int32_t* positions,
                        bool reverse) {
  const int64_t element = int64_t{blockIdx.x} * kScanThreads + threadIdx.x;
  if (element >= elements) return;
  const int chunks = static_cast<int>(rebased_chunks(tokens));
  float running = 0.0f;
  for (int begin = 0; begin < chunks; begin += kScanBatch) {
    float own[kScanBatch];
    const auto chunk_of = [&](int i) { return reverse ? chunks - 1 - begin - i : begin + i; };
#pragma unroll
    for (int i = 0; i < kScanBatch; ++i) {
      own[i] = begin + i < chunks ? states[chunk_of(i) * elements + element] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kScanBatch; ++i) {
      if (begin + i >= chunks) break;
      const int chunk = chunk_of(i);
      states[chunk * elements + element] = running;
      const int last = min((chunk + 1) * kRebasedChunk, tokens) - 1;
      running = own[i] + (sees_rebased_state(last, positions[last]) ? running : 0.0f);
    }
  }
}

// state = the sum of all chunks' sums, in their order.
static __global__ void __launch_bounds__(kScanThreads)
    rebased_total_kernel(float* state, const float* sums, int64_t elements, int64_t chunks) {
  const int64_t element = int64_t{blockIdx.x} * kScanThreads + threadIdx.x;
  if (element >= elements) return;
  float total = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * elements + element];
  state[element] = total;
}

}  // namespace sbtrain::kernels
