// Weights are formed pair by pair with bf16 tensor core products, as in softmax.cu: tiles are
// aligned to the pack, query j sees the keys [first_rebased_key(j), j]. In the chunked form these
// are of its own chunk alone; for earlier keys stands the state S (rebased_index.h), with tf32
// products whose left operands are formed in registers. With S symmetric in the features a and b,
//   sum_i s_ij [v_i | 1] += sum_b square q_b (sum_a q_a S_ab) + linear sum_a q_a S_a + constant S_1
//   dq_a += scale (sum_b 2 square q_b (g S_ab) + linear g S_a),   q = scale q_j,
//   g_j = (do_j, -do_j.o_j) / den_j
// and s is symmetric in q and k: dv and dk are the same two sums over the state of queries
// sum_j (products of q) g_j, formed from right to left.
#include "kernels/attention/document_end.cuh"
#include "kernels/attention/padded_tile.cuh"
#include "kernels/attention/rebased.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/launch.h"

namespace sbtrain::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

__device__ __forceinline__ int thread() {
  return static_cast<int>(threadIdx.x);
}

// What kernels know besides the problem.
struct Launch {
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
  // Queries behind the pack see what the last one sees; nothing of them is written.
  __device__ int first_key(int query) const {
    const int row = min(query, p.tokens - 1);
    return first_rebased_key(row, p.positions[row], chunked());
  }
  __device__ float weight(float x) const {
    return p.s.constant + x * (p.s.linear + x * p.s.square);
  }
  __device__ float slope(float x) const { return p.s.linear + 2.0f * x * p.s.square; }
};

template <int kFeatures, int kValues>
struct Shape {
  static constexpr int kF = kFeatures;
  static constexpr int kE = kValues;
  static constexpr int kRowBlocks = kE == 128 || kF == 32 ? 1 : 2;  // of 16 rows, each warp
  static constexpr int kRows = 16 * kRowBlocks * kWarps;            // of a block: divides a chunk
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
struct Shared {
  __device__ explicit Shared(bf16* memory)
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

// Copies tokens from `row` on to two tiles of kRows: the features that x has of them and the values
// that y has.
template <typename S, int kRows>
__device__ __forceinline__ void load_tokens(bf16* features, bf16* values, const Launch& t,
                                            const RebasedTensor& x, const RebasedTensor& y,
                                            int row) {
  const Rebased& p = t.p;
  load_padded<kRows, S::kF, kThreads>(features, t.features(x, row), x.stride, p.tokens - row,
                                      p.features, t.f_width);
  load_padded<kRows, S::kE, kThreads>(values, t.values(y, row), y.stride, p.tokens - row, p.values,
                                      t.e_width);
}

// ---- States -------------------------------------------------------------------------------------

// kSlices slices b = first, ...: [a, column] of S_ab as tf32, and behind them [a] of the last
// column as f32. Slice f is that of the linear term; beyond, zeros.
template <typename S>
__device__ void load_slices(float* slices, const Launch& t, const float* state, int first) {
  const int f = t.p.features;
  const int width = t.width();
  const auto row_of = [&](int i) {  // of the state, or -1
    const int a = i % S::kF;
    const int b = first + i / S::kF;
    if (a >= f || b > f || (b == f && !t.lower)) return -1;
    return b == f ? 1 + a : rebased_row(f, t.lower, a, b);
  };
#pragma unroll 4
  for (int n = thread(); n < S::kSlices * S::kF * S::kE; n += kThreads) {
    const int i = n / S::kE;
    const int c = n % S::kE;
    const int row = row_of(i);
    const float value = row >= 0 && c < t.p.values ? state[row * width + c] : 0.0f;
    slices[i * S::kValueStride + c] = __uint_as_float(to_tf32(value));
  }
  float* last = slices + S::kSlices * S::kF * S::kValueStride;
  for (int i = thread(); i < S::kSlices * S::kF; i += kThreads) {
    const int row = row_of(i);
    last[i] = row >= 0 ? state[row * width + width - 1] : 0.0f;
  }
}

// use(b, slice, last) for every slice of the state. All threads of the block take part.
template <typename S, typename Use>
__device__ __forceinline__ void for_each_slice(float* slices, const Launch& t, const float* state,
                                               Use&& use) {
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

// The features x of the lane's rows: those of its fragments, and any.
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
          fragment[r][k][i] = at(r * 2 + i % 2, k * 8 + thread() % 4 + i / 2 * 4);
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
  const int c = thread() % 4;
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
  const int c = thread() % 4;
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
                                             const Launch& t, const float* state) {
  if (!t.lower) return;
  y.for_each([&](float& value, auto at) {
    if (at.col < t.p.values) value += weight[at.lane_row] * t.p.s.constant * state[at.col];
  });
  if (thread() % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 2 * S::kRowBlocks; ++i) {
    sum[i] += weight[i] * t.p.s.constant * state[t.p.values];
  }
}

// Which side of the pairs a state sums over.
enum class Side : uint8_t { kKeys, kQueries };

template <int kF, int kE>
struct SumShape {
  static constexpr int kTokenStride = kRebasedChunk + 4;  // of the features, transposed
  static constexpr int kSharedBytes =
      2 * kRebasedChunk * kPaddedStride<kE> + 4 * ((kF + 1) * kTokenStride + 2 * kRebasedChunk);
};

// states[chunk] = sum over the tokens of the chunk that take part of (products of features) [v | 1]
// or, of queries, of scale q and g. A block for each chunk and head.
template <int kF, int kE, Side kSide>
__global__ void __launch_bounds__(kThreads) sum_kernel(const Launch t) {
  using S = SumShape<kF, kE>;
  constexpr bool kOfKeys = kSide == Side::kKeys;
  extern __shared__ __align__(128) bf16 shared[];
  bf16* const u = shared;  // [chunk, kE]
  float* const x =
      reinterpret_cast<float*>(u + kRebasedChunk * kPaddedStride<kE>);  // [kF + 1, chunk]
  float* const weights = x + (kF + 1) * S::kTokenStride;
  float* const last_u = weights + kRebasedChunk;

  const Rebased& p = t.p;
  const int f = p.features;
  const int first = static_cast<int>(blockIdx.x) * kRebasedChunk;
  const int count = min(kRebasedChunk, p.tokens - first);
  load_padded<kRebasedChunk, kE, kThreads>(u, t.values(kOfKeys ? p.v : p.dout, first),
                                           kOfKeys ? p.v.stride : p.dout.stride, count, p.values,
                                           t.e_width);
  const bf16* const features = t.features(kOfKeys ? p.k : p.q, first);
  const int64_t stride = kOfKeys ? p.k.stride : p.q.stride;
  const float scale = kOfKeys ? 1.0f : p.s.scale;
#pragma unroll 4
  for (int i = thread(); i < kRebasedChunk * kF; i += kThreads) {
    const int token = i / kF;
    const int a = i % kF;
    const bool valid = token < count && a < f;
    x[a * S::kTokenStride + token] = valid ? scale * to_float(features[token * stride + a]) : 0.0f;
  }
  for (int i = thread(); i < kRebasedChunk; i += kThreads) {
    x[kF * S::kTokenStride + i] = 1.0f;
    const int token = first + i;
    float weight = 0.0f;
    float last = 0.0f;
    if (i < count) {
      const int end = first + count - 1;
      if (kOfKeys) {  // without positions all tokens are of one document
        weight = p.positions == nullptr || token >= first_in_rebased_state(end, p.positions[end])
                     ? 1.0f
                     : 0.0f;
        last = 1.0f;
      } else {
        if (sees_rebased_state(token, p.positions[token])) weight = 1.0f / p.den[t.in_head(token)];
        last = -t.delta[t.in_head(token)];
      }
    }
    weights[i] = weight;
    last_u[i] = last;
  }
  __syncthreads();

  const int rows = t.rows();
  const int width = t.width();
  float* const out =
      t.states + (int64_t{blockIdx.x} * p.heads + blockIdx.y) * int64_t{rows} * width;
  const int c = thread() % 4;
  for (int begin = thread() / 32 * 16; begin < rows; begin += 16 * kWarps) {
    const float* factors[2][2];  // of the lane's two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RebasedFactors of =
          rebased_factors(f, t.lower, min(begin + lane_row() + i * 8, rows - 1));
      factors[i][0] = x + (of.a == f ? kF : of.a) * S::kTokenStride;
      factors[i][1] = x + (of.b == f ? kF : of.b) * S::kTokenStride;
    }
    Accumulator<1, kE / 8> sums;
    sums.clear();
    float last_sum[2] = {};
    for (int token = c; token < kRebasedChunk; token += 8) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = token + i / 2 * 4;
        const float value = factors[i % 2][0][at] * factors[i % 2][1][at] * weights[at];
        last_sum[i % 2] += value * last_u[at];
        a[i] = to_tf32(value);
      }
      const bf16* b = u + token * kPaddedStride<kE> + lane_row();
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
      const float sum = sum_of_quad(last_sum[i]);
      const int row = begin + lane_row() + i * 8;
      if (c == 0 && row < rows) out[int64_t{row} * width + p.values] = sum;
    }
  }
}

constexpr int kScanThreads = 256;
constexpr int kScanBatch = 8;  // loads in flight

// Sums of chunks become the states that enter them, from the left; `reverse`: that leave them, from
// the right. One thread for each of the `elements` of the states of one chunk.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(float* states, int64_t elements, int tokens, const int32_t* positions,
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
__global__ void __launch_bounds__(kScanThreads)
    total_kernel(float* state, const float* sums, int64_t elements, int64_t chunks) {
  const int64_t element = int64_t{blockIdx.x} * kScanThreads + threadIdx.x;
  if (element >= elements) return;
  float total = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * elements + element];
  state[element] = total;
}

// ---- Forward ------------------------------------------------------------------------------------

// What the queries of one warp see, in kernels whose tiles are of queries.
template <int kRowBlocks>
struct VisibleKeys {
  __device__ VisibleKeys(const Launch& t, int first_query) : first(first_query) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) key[i] = t.first_key(first + lane_row() + i * 8);
    lowest = t.first_key(first);
    highest = t.first_key(first + 16 * kRowBlocks - 1);
  }
  __device__ bool some(int begin, int keys) const {
    return begin < first + 16 * kRowBlocks && begin + keys > lowest;
  }
  __device__ bool all(int begin, int keys) const {
    return begin + keys <= first + 1 && begin >= highest;
  }
  __device__ bool one(int lane_row, int query, int at) const {
    return at <= query && at >= key[lane_row];
  }
  int first;                // query
  int key[2 * kRowBlocks];  // first keys of the lane's rows
  int lowest, highest;      // and of the first and last query
};

// 1 for the lane's rows that see the state which enters their chunk, 0 for others and behind the
// pack.
template <int kRowBlocks>
struct SeesState {
  __device__ SeesState(const Launch& t, int first_query) {
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = first_query + lane_row() + i * 8;
      const bool sees = row < t.p.tokens && sees_rebased_state(row, t.p.positions[row]);
      weight[i] = sees ? 1.0f : 0.0f;
    }
  }
  float weight[2 * kRowBlocks];
};

template <typename S>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Launch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const Shared<S> shared(memory);
  const Rebased& p = t.p;
  // The last queries see the most keys: they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows;
  const int warp_row = thread() / 32 * 16 * kRowBlocks;
  const VisibleKeys<kRowBlocks> visible(t, first + warp_row);
  load_padded<S::kRows, S::kF, kThreads>(shared.features, t.features(p.q, first), p.q.stride,
                                         p.tokens - first, p.features, t.f_width);
  Accumulator<kRowBlocks, S::kE / 8> o;
  o.clear();
  float den[2 * kRowBlocks] = {};  // this lane's part

  const int end = min(first + S::kRows, p.tokens);
  for (int key = t.first_key(first); key < end; key += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(shared.inner_features, shared.inner_values, t, p.k, p.v, key);
    __syncthreads();
    if (!visible.some(key, S::kInner)) continue;
    Accumulator<kRowBlocks, S::kInner / 8> s;
    padded_product<S::kF>(s, shared.features, warp_row, shared.inner_features);
    const bool all = visible.all(key, S::kInner);
    s.for_each([&](float& x, auto at) {
      x = t.weight(p.s.scale * x);
      if (!all && !visible.one(at.lane_row, visible.first + at.row, key + at.col)) x = 0.0f;
      x = to_float(__float2bfloat16_rn(x));  // as in the product: o is a mean, to the last bit
      den[at.lane_row] += x;
    });
    add_padded_product<S::kE>(o, s, shared.inner_values);
  }

  // Rows behind the first do not see the state if it does not.
  if (t.chunked() && sees_rebased_state(first, p.positions[first])) {
    const float* state = t.state(first / kRebasedChunk);
    const SeesState<kRowBlocks> sees(t, visible.first);
    const RowFeatures<S> q(shared.features, warp_row, p.s.scale);
    for_each_slice<S>(shared.slices, t, state, [&](int b, const float* slice, const float* last) {
      float factor[2 * kRowBlocks];
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        factor[i] = sees.weight[i] * (b < p.features ? p.s.square * q.at(i, b) : p.s.linear);
      }
      add_values<S>(o, den, q, factor, slice, last);
    });
    add_constant<S>(o, den, sees.weight, t, state);
  }

  const int rows = p.tokens - visible.first;
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    den[i] = sum_of_quad(den[i]) + p.s.eps;
    const int row = lane_row() + i * 8;
    if (thread() % 4 == 0 && row < rows) p.den[t.in_head(visible.first + row)] = den[i];
  }
  store_padded(t.values(p.o, visible.first), p.o.stride, rows, p.values, t.e_width > 1, o,
               [&](int i) { return 1.0f / den[i]; });
}

// ---- Backward -----------------------------------------------------------------------------------
// P = s / den, dS = (do v^T - delta) / den slope(x), delta = rowsum(do o); dv = P^T do,
// dk = scale dS^T q, dq = scale dS k. One kernel for dq and one for dk and dv, each the only writer
// of its rows.

// One thread for each token and head.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) delta_kernel(const Launch t, float* delta_HT) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
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

template <typename S>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(const Launch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const Shared<S> shared(memory);
  const Rebased& p = t.p;
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows;
  const int warp_row = thread() / 32 * 16 * kRowBlocks;
  const VisibleKeys<kRowBlocks> visible(t, first + warp_row);
  load_tokens<S, S::kRows>(shared.features, shared.values, t, p.q, p.dout, first);
  float inverse[2 * kRowBlocks], delta[2 * kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; ++i) {
    const int64_t at = t.in_head(min(visible.first + lane_row() + i * 8, p.tokens - 1));
    inverse[i] = 1.0f / p.den[at];
    delta[i] = t.delta[at];
  }
  Accumulator<kRowBlocks, S::kF / 8> dq;
  dq.clear();

  const int end = min(first + S::kRows, p.tokens);
  for (int key = t.first_key(first); key < end; key += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(shared.inner_features, shared.inner_values, t, p.k, p.v, key);
    __syncthreads();
    if (!visible.some(key, S::kInner)) continue;
    Accumulator<kRowBlocks, S::kInner / 8> s, ds;
    padded_product<S::kF>(s, shared.features, warp_row, shared.inner_features);
    padded_product<S::kE>(ds, shared.values, warp_row, shared.inner_values);
    const bool all = visible.all(key, S::kInner);
    s.for_each([&](float& x, auto at) {
      x = t.slope(p.s.scale * x);
      if (!all && !visible.one(at.lane_row, visible.first + at.row, key + at.col)) x = 0.0f;
    });
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < S::kInner / 8; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = r * 2 + i / 2;
          ds.at[r][c][i] = s.at[r][c][i] * (ds.at[r][c][i] - delta[row]) * inverse[row];
        }
      }
    }
    add_padded_product<S::kF>(dq, ds, shared.inner_features);
  }

  if (t.chunked() && sees_rebased_state(first, p.positions[first])) {
    const SeesState<kRowBlocks> sees(t, visible.first);
    const RowFeatures<S> q(shared.features, warp_row, p.s.scale);
    float minus_delta[2 * kRowBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) minus_delta[i] = -delta[i];
    for_each_slice<S>(shared.slices, t, t.state(first / kRebasedChunk),
                      [&](int b, const float* slice, const float* last) {
                        float factor[2 * kRowBlocks];
#pragma unroll
                        for (int i = 0; i < 2 * kRowBlocks; ++i) {
                          factor[i] =
                              sees.weight[i] * inverse[i] *
                              (b < p.features ? 2.0f * p.s.square * q.at(i, b) : p.s.linear);
                        }
                        add_slopes<S>(dq, shared.values + warp_row * S::kValueRow, minus_delta,
                                      factor, slice, last);
                      });
  }
  store_padded(t.features(p.dq, visible.first), p.dq.stride, p.tokens - visible.first, p.features,
               t.f_width > 1, dq, [&](int) { return p.s.scale; });
}

// What the inner loop over queries knows of each: [kInner] in shared memory.
struct QueryValues {
  float* inverse;  // 1 / den, 0 behind the pack
  float* delta;
  int* first_key;
};

template <typename S>
__global__ void __launch_bounds__(kThreads) key_gradient_kernel(const Launch t) {
  constexpr int kRowBlocks = S::kRowBlocks;
  extern __shared__ __align__(128) bf16 memory[];
  const Shared<S> shared(memory);
  const QueryValues of = {shared.numbers, shared.numbers + S::kInner,
                          reinterpret_cast<int*>(shared.numbers + 2 * S::kInner)};
  const Rebased& p = t.p;
  const int first = static_cast<int>(blockIdx.x) * S::kRows;
  const int warp_row = thread() / 32 * 16 * kRowBlocks;
  const int warp_first = first + warp_row;
  load_tokens<S, S::kRows>(shared.features, shared.values, t, p.k, p.v, first);
  Accumulator<kRowBlocks, S::kF / 8> dk;
  Accumulator<kRowBlocks, S::kE / 8> dv;
  dk.clear();
  dv.clear();

  const int chunk_begin = first / kRebasedChunk * kRebasedChunk;
  const int chunk_end = min(chunk_begin + kRebasedChunk, p.tokens);
  const int documents_end = document_end(p, min(first + S::kRows, p.tokens) - 1);
  const int end = t.chunked() ? min(chunk_end, documents_end) : documents_end;
  for (int query = first; query < end; query += S::kInner) {
    __syncthreads();
    load_tokens<S, S::kInner>(shared.inner_features, shared.inner_values, t, p.q, p.dout, query);
    if (thread() < S::kInner) {
      const int row = query + thread();
      const int64_t at = t.in_head(min(row, p.tokens - 1));
      of.inverse[thread()] = row < p.tokens ? 1.0f / p.den[at] : 0.0f;
      of.delta[thread()] = t.delta[at];
      of.first_key[thread()] = t.first_key(row);
    }
    __syncthreads();
    // First keys never decrease.
    if (query + S::kInner <= warp_first || of.first_key[0] >= warp_first + 16 * kRowBlocks) {
      continue;
    }
    Accumulator<kRowBlocks, S::kInner / 8> s, ds;
    padded_product<S::kF>(s, shared.features, warp_row, shared.inner_features);
    padded_product<S::kE>(ds, shared.values, warp_row, shared.inner_values);
#pragma unroll
    for (int c = 0; c < S::kInner / 8; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int i = c * 8 + thread() % 4 * 2 + odd;
        const float inverse = of.inverse[i];
        const float delta = of.delta[i];
        const int first_key = of.first_key[i];
#pragma unroll
        for (int r = 0; r < 2 * kRowBlocks; ++r) {
          const int key = warp_first + lane_row() + r * 8;
          float& weight = s.at[r / 2][c][r % 2 * 2 + odd];
          float& slope = ds.at[r / 2][c][r % 2 * 2 + odd];
          const float x = p.s.scale * weight;
          const float factor = key <= query + i && key >= first_key ? inverse : 0.0f;
          weight = factor * t.weight(x);
          slope = factor * t.slope(x) * (slope - delta);
        }
      }
    }
    add_padded_product<S::kE>(dv, s, shared.inner_values);
    add_padded_product<S::kF>(dk, ds, shared.inner_features);
  }
  dk.for_each([&](float& x, auto) { x *= p.s.scale; });

  // Queries of later chunks. Of this block's keys the last are part of the state, if any are.
  const int first_in_state = first_in_rebased_state(chunk_end - 1, p.positions[chunk_end - 1]);
  if (t.chunked() && first + S::kRows > first_in_state) {
    const float* state = t.state(first / kRebasedChunk);
    const RowFeatures<S> k(shared.features, warp_row, 1.0f);
    float in_state[2 * kRowBlocks], ones[2 * kRowBlocks], unused[2 * kRowBlocks] = {};
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const int row = warp_first + lane_row() + i * 8;
      in_state[i] = row >= first_in_state ? 1.0f : 0.0f;
      ones[i] = 1.0f;
    }
    for_each_slice<S>(shared.slices, t, state, [&](int b, const float* slice, const float* last) {
      float of_value[2 * kRowBlocks], of_slope[2 * kRowBlocks];
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        const float square = b < p.features ? p.s.square * k.at(i, b) : 0.0f;
        const float linear = b < p.features ? 0.0f : p.s.linear;
        of_value[i] = in_state[i] * (square + linear);
        of_slope[i] = in_state[i] * (2.0f * square + linear);
      }
      add_values<S>(dv, unused, k, of_value, slice, last);
      add_slopes<S>(dk, shared.values + warp_row * S::kValueRow, ones, of_slope, slice, last);
    });
    add_constant<S>(dv, unused, in_state, t, state);
  }
  const int rows = p.tokens - warp_first;
  const auto one = [](int) { return 1.0f; };
  store_padded(t.features(p.dk, warp_first), p.dk.stride, rows, p.features, t.f_width > 1, dk, one);
  store_padded(t.values(p.dv, warp_first), p.dv.stride, rows, p.values, t.e_width > 1, dv, one);
}

// ---- Decode -------------------------------------------------------------------------------------

constexpr int kDecodeWarps = 8;
constexpr int kMaxColumns = (kMaxRebasedValues + 1 + 31) / 32;  // of a lane

// A block for each head of each sequence. A warp takes every kDecodeWarps-th row of the state, a
// lane every 32nd column.
__global__ void __launch_bounds__(32 * kDecodeWarps) decode_kernel(const RebasedDecode p) {
  __shared__ float q[kMaxRebasedFeatures + 1], k[kMaxRebasedFeatures + 1];
  __shared__ float sums[kDecodeWarps][32 * kMaxColumns];
  const int head = static_cast<int>(blockIdx.x);
  const int64_t b = blockIdx.y;
  const int f = p.features;
  const int e = p.values;
  const bool lower = p.s.constant != 0.0f || p.s.linear != 0.0f;
  for (int a = thread(); a < f; a += 32 * kDecodeWarps) {
    q[a] = p.s.scale * to_float(p.q.data[b * p.q.stride + head * f + a]);
    k[a] = to_float(p.k.data[b * p.k.stride + head * f + a]);
  }
  if (thread() == 0) q[f] = k[f] = 1.0f;
  __syncthreads();
  const int warp = thread() / 32;
  const int lane = thread() % 32;
  const int rows = rebased_rows(f, lower);
  const bool fresh = p.positions[b] == 0;
  float* const state = p.state + (b * p.heads + head) * rows * (e + 1);
  const bf16* const value = p.v.data + b * p.v.stride + head * e;
  float v[kMaxColumns], y[kMaxColumns] = {};
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j) {
    const int c = lane + 32 * j;
    v[j] = c < e ? to_float(value[c]) : 1.0f;
  }
#pragma unroll 4
  for (int row = warp; row < rows; row += kDecodeWarps) {
    const RebasedFactors of = rebased_factors(f, lower, row);
    const float of_k = k[of.a] * k[of.b];
    const float factor = of.a == f      ? p.s.constant
                         : of.b == f    ? p.s.linear
                         : of.a == of.b ? p.s.square
                                        : 2.0f * p.s.square;
    const float of_q = factor * q[of.a] * q[of.b];
    float* const at = state + int64_t{row} * (e + 1);
#pragma unroll
    for (int j = 0; j < kMaxColumns; ++j) {
      const int c = lane + 32 * j;
      if (c > e) continue;
      const float now = (fresh ? 0.0f : at[c]) + of_k * v[j];
      at[c] = now;
      y[j] += of_q * now;
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j) sums[warp][lane + 32 * j] = y[j];
  __syncthreads();
  const auto total = [&](int c) {
    float sum = 0.0f;
    for (int w = 0; w < kDecodeWarps; ++w) sum += sums[w][c];
    return sum;
  };
  for (int c = thread(); c < e; c += 32 * kDecodeWarps) {
    p.o.data[b * p.o.stride + head * e + c] = __float2bfloat16_rn(total(c) / (total(e) + p.s.eps));
  }
}

// ---- Launches -----------------------------------------------------------------------------------

bool has_lower(const RebasedPolynomial& s) {
  return s.constant != 0.0f || s.linear != 0.0f;
}

// The elements that heads of `size` can be read by.
int width_of(int size, std::initializer_list<const RebasedTensor*> tensors) {
  for (const int width : {8, 4}) {
    bool fits = size % width == 0;
    for (const RebasedTensor* x : tensors) {
      fits =
          fits && x->stride % width == 0 && reinterpret_cast<uintptr_t>(x->data) % (2 * width) == 0;
    }
    if (fits) return width;
  }
  return 1;
}

Launch launch_of(const Rebased& p) {
  Launch t{};
  t.p = p;
  t.f_width = width_of(p.features, {&p.q, &p.k, &p.dq, &p.dk});
  t.e_width = width_of(p.values, {&p.v, &p.o, &p.dout, &p.dv});
  t.lower = has_lower(p.s);
  return t;
}

// Heads [first, first + count).
Launch heads_of(Launch t, int first, int count) {
  const auto advance = [](auto*& data, int64_t elements) {
    if (data != nullptr) data += elements;
  };
  for (RebasedTensor* x : {&t.p.q, &t.p.k, &t.p.dq, &t.p.dk}) {
    advance(x->data, int64_t{first} * t.p.features);
  }
  for (RebasedTensor* x : {&t.p.v, &t.p.o, &t.p.dout, &t.p.dv}) {
    advance(x->data, int64_t{first} * t.p.values);
  }
  advance(t.p.den, int64_t{first} * t.p.tokens);
  advance(t.delta, int64_t{first} * t.p.tokens);
  t.p.heads = count;
  return t;
}

// run(heads) for all heads, `group` at a time.
template <typename Run>
void for_each_group(const Launch& t, int group, Run&& run) {
  for (int first = 0; first < t.p.heads; first += group) {
    run(heads_of(t, first, std::min(group, t.p.heads - first)));
  }
}

template <typename Kernel>
void launch(const char* name, cudaStream_t stream, Kernel* kernel, dim3 grid, int shared_bytes,
            const Launch& t) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
  }
  kernel<<<grid, kThreads, shared_bytes, stream>>>(t);
  check_launch(name);
}

template <int kF, typename Run>
void with_values(int values, Run&& run) {
  if (values <= 16) return run(Shape<kF, 16>{});
  if (values <= 32) return run(Shape<kF, 32>{});
  if (values <= 64) return run(Shape<kF, 64>{});
  run(Shape<kF, 128>{});
}
// run(shape) with the smallest shape that holds the heads.
template <typename Run>
void with_shape(const Rebased& p, Run&& run) {
  if (p.features < 1 || p.features > kMaxRebasedFeatures || p.values < 1 ||
      p.values > kMaxRebasedValues) {
    throw std::invalid_argument("rebased: heads of " + std::to_string(p.features) +
                                " features and " + std::to_string(p.values) + " values");
  }
  if (p.features <= 16) {
    with_values<16>(p.values, run);
  } else {
    with_values<32>(p.values, run);
  }
}

template <typename S>
dim3 grid_of(const Launch& t) {
  return dim3(blocks(t.p.tokens, S::kRows), t.p.heads);
}
int64_t state_elements(const Launch& t) {
  return int64_t{t.p.heads} * rebased_rows(t.p.features, t.lower) * (t.p.values + 1);
}

template <typename S, Side kSide>
void sum_chunks(cudaStream_t stream, const Launch& t) {
  launch("rebased", stream, sum_kernel<S::kF, S::kE, kSide>,
         dim3(static_cast<unsigned>(rebased_chunks(t.p.tokens)), t.p.heads),
         SumShape<S::kF, S::kE>::kSharedBytes, t);
}
// The states that enter the chunks, or the gradients of those that leave them.
template <typename S, Side kSide>
void form_states(cudaStream_t stream, const Launch& t) {
  if (t.states == nullptr) return;
  sum_chunks<S, kSide>(stream, t);
  const int64_t elements = state_elements(t);
  scan_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(
      t.states, elements, t.p.tokens, t.p.positions, kSide == Side::kQueries);
  check_launch("rebased");
}

void write_delta(cudaStream_t stream, const Launch& t, float* delta) {
  const unsigned grid = blocks(int64_t{t.p.tokens} * t.p.heads, kThreads);
  switch (t.e_width) {
    case 8:
      delta_kernel<8><<<grid, kThreads, 0, stream>>>(t, delta);
      break;
    case 4:
      delta_kernel<4><<<grid, kThreads, 0, stream>>>(t, delta);
      break;
    default:
      delta_kernel<1><<<grid, kThreads, 0, stream>>>(t, delta);
  }
  check_launch("rebased_backward");
}

}  // namespace

void rebased_forward(cudaStream_t stream, const Rebased& p) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    Launch all = launch_of(p);
    if (p.chunked) all.states = p.scratch;
    for_each_group(all, p.chunked ? p.group : p.heads, [&](const Launch& t) {
      form_states<S, Side::kKeys>(stream, t);
      launch("rebased_forward", stream, forward_kernel<S>, grid_of<S>(t), S::kSharedBytes, t);
    });
  });
}

void rebased_backward(cudaStream_t stream, const Rebased& p) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    Launch all = launch_of(p);
    float* delta = p.scratch;
    if (p.chunked) {
      all.states = p.scratch;
      delta +=
          rebased_chunks(p.tokens) * p.group * rebased_rows(p.features, all.lower) * (p.values + 1);
    }
    all.delta = delta;
    write_delta(stream, all, delta);
    for_each_group(all, p.chunked ? p.group : p.heads, [&](const Launch& t) {
      form_states<S, Side::kKeys>(stream, t);
      launch("rebased_backward", stream, query_gradient_kernel<S>, grid_of<S>(t), S::kSharedBytes,
             t);
      form_states<S, Side::kQueries>(stream, t);
      launch("rebased_backward", stream, key_gradient_kernel<S>, grid_of<S>(t), S::kSharedBytes, t);
    });
  });
}

void rebased_state(cudaStream_t stream, const Rebased& p, float* state) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    Launch all = launch_of(p);
    all.p.positions = nullptr;
    all.states = p.scratch;
    const int64_t chunks = rebased_chunks(p.tokens);
    float* to = state;
    for_each_group(all, p.group, [&](const Launch& t) {
      if (chunks > 0) sum_chunks<S, Side::kKeys>(stream, t);
      const int64_t elements = state_elements(t);
      total_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(to, t.states,
                                                                                elements, chunks);
      check_launch("rebased_state");
      to += elements;
    });
  });
}

void rebased_decode(cudaStream_t stream, const RebasedDecode& p) {
  if (p.batch == 0 || p.heads == 0) return;
  const dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.batch));
  decode_kernel<<<grid, 32 * kDecodeWarps, 0, stream>>>(p);
  check_launch("rebased_decode");
}

}  // namespace sbtrain::kernels
