#include <cfloat>

#include "kernels/attention/fire.h"
#include "kernels/decode.h"
#include "kernels/elementwise.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

template <typename T>
struct CacheAppendOp {
  CacheAppend p;
  template <int kWidth>
  __device__ Pack<T, kWidth> load(int64_t row, int64_t col) const {
    return load_pack<kWidth>(static_cast<const T*>(p.x.data) + row * p.x.stride + col);
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<T, kWidth>& loaded) const {
    const int64_t position = p.positions[row];
    require(position >= 0 && position < p.capacity);
    store_pack(static_cast<T*>(p.cache) + (row * p.capacity + position) * p.cols + col, loaded);
  }
};

template <typename T>
void append(cudaStream_t stream, const CacheAppend& p) {
  const bool vectors = vectors_fit<8>(Matrix<T>{static_cast<T*>(p.cache), p.cols},
                                      Matrix<const T>{static_cast<const T*>(p.x.data), p.x.stride});
  launch_elementwise<8>(stream, "cache_append", p.batch, p.cols, vectors, CacheAppendOp<T>{p});
}

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBatch = 4;  // keys whose loads are in flight

// Channels lane, lane + 32, ... of one head, in f32; zeros beyond head_dim.
template <int kPer>
struct Channels {
  float value[kPer] = {};
  Channels() = default;
  __device__ Channels(const bf16* row, int head_dim, int lane) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int c = lane + 32 * j;
      value[j] = c < head_dim ? to_float(row[c]) : 0.0f;
    }
  }
  // `sum` is what this lane adds to the product.
  __device__ float dot(const Channels& other, float sum = 0.0f) const {
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum += value[j] * other.value[j];
    return lanes_sum<32>(sum);
  }
  __device__ void add(float weight, const Channels& other) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) value[j] += weight * other.value[j];
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) value[j] *= factor;
  }
};

// The head and sequence that this block computes.
struct CachedHead {
  __device__ explicit CachedHead(const Decode& t)
      : head(blockIdx.x), batch(blockIdx.y), length(t.lengths[blockIdx.y]) {
    require(length > 0 && length <= t.capacity);
    width = int64_t{t.key_heads} * t.head_dim;
    const int64_t key_head = head / (t.heads / t.key_heads);
    const int64_t begin = batch * t.capacity * width + key_head * t.head_dim;
    k = t.k_cache + begin;
    v = t.v_cache + begin;
    q = t.q.row(batch) + int64_t{head} * t.head_dim;
    o = t.o.row(batch) + int64_t{head} * t.head_dim;
  }
  int head;
  int64_t batch;
  int64_t length;
  int64_t width;  // elements from key to key
  const bf16* k;
  const bf16* v;
  const bf16* q;
  bf16* o;
};

// Each warp takes a range of the keys, warp 0 the first.
struct Range {
  int64_t begin, end;
};
__device__ Range warp_keys(int64_t begin, int64_t end, int warp) {
  const int64_t count = end - begin;
  return {begin + count * warp / kWarps, begin + count * (warp + 1) / kWarps};
}

// What a bias adds to the logit of the key `distance` tokens before the query, as the sum over the
// lanes of a warp; of_head(head, position of the query, lane) creates it.
struct NoBias {
  __device__ NoBias of_head(int, int64_t, int) const { return {}; }
  __device__ float operator()(int64_t) const { return 0.0f; }
};

struct AlibiBias {
  struct OfHead {
    float slope;  // 0 except on one lane
    __device__ float operator()(int64_t distance) const {
      return -slope * static_cast<float>(distance);
    }
  };
  __device__ OfHead of_head(int head, int64_t, int lane) const {
    return {lane == 0 ? slopes.of_head[head] : 0.0f};
  }
  AlibiSlopes slopes;
};

// Each lane computes one hidden unit. b2 shifts all logits of the head alike, so it is left out.
struct FireBias {
  static_assert(kFireUnits == 32);
  struct OfHead {
    float rate, r, w1, b1, w2;
    __device__ float operator()(int64_t distance) const {
      const float u = log1pf(rate * static_cast<float>(distance)) * r;
      return w2 * fmaxf(fmaf(w1, u, b1), 0.0f);
    }
  };
  __device__ OfHead of_head(int head, int64_t position, int lane) const {
    const float c = to_float(*x.c);
    return {fabsf(c), fire_query(c, to_float(*x.m), static_cast<int>(position)).r,
            to_float(x.w1[lane]), to_float(x.b1[lane]), to_float(x.w2[head * kFireUnits + lane])};
  }
  FireParameters x;
};

template <int kPer, typename Bias>
__global__ void __launch_bounds__(kThreads)
    softmax_decode_kernel(const SoftmaxDecode p, const __grid_constant__ Bias biases) {
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  __shared__ float outputs[kWarps][32 * kPer];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int d = p.t.head_dim;
  const CachedHead head(p.t);
  Channels<kPer> q(head.q, d, lane);
  q.scale(p.t.scale);
  const auto bias = biases.of_head(head.head, head.length - 1, lane);
  const int64_t first = p.window > 0 ? max(int64_t{0}, head.length - p.window) : 0;
  const Range keys = warp_keys(first, head.length, warp);
  float maximum = -FLT_MAX;
  float sum = 0.0f;
  Channels<kPer> o;
  for (int64_t begin = keys.begin; begin < keys.end; begin += kBatch) {
    Channels<kPer> k[kBatch];
    Channels<kPer> v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t key = min(begin + b, keys.end - 1);
      k[b] = Channels<kPer>(head.k + key * head.width, d, lane);
      v[b] = Channels<kPer>(head.v + key * head.width, d, lane);
    }
    float z[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t key = min(begin + b, keys.end - 1);
      z[b] = q.dot(k[b], bias(head.length - 1 - key));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (begin + b >= keys.end) continue;
      const float larger = fmaxf(maximum, z[b]);
      const float rescale = __expf(maximum - larger);
      const float weight = __expf(z[b] - larger);
      maximum = larger;
      sum = sum * rescale + weight;
      o.scale(rescale);
      o.add(weight, v[b]);
    }
  }
  maxima[warp] = maximum;
  sums[warp] = sum;
  for (int j = 0; j < kPer; ++j) outputs[warp][lane + 32 * j] = o.value[j];
  __syncthreads();
  float largest = -FLT_MAX;
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, maxima[w]);
  float total = 0.0f;
  for (int w = 0; w < kWarps; ++w) total += sums[w] * __expf(maxima[w] - largest);
  for (int c = threadIdx.x; c < d; c += kThreads) {
    float y = 0.0f;
    for (int w = 0; w < kWarps; ++w) y += outputs[w][c] * __expf(maxima[w] - largest);
    head.o[c] = __float2bfloat16_rn(y / total);
  }
}

// The parts of the stick that one key takes and leaves. Neither is computed by a subtraction that
// cancels.
struct Break {
  float beta, rest;
};
__device__ Break break_at(float z, float gate) {
  const float e = __expf(-fabsf(z));
  const float large = 1.0f / (1.0f + e);
  const float small = e * large;
  const float sigma = z > 0.0f ? large : small;
  const float complement = z > 0.0f ? small : large;
  return {gate * sigma, (1.0f - gate) + gate * complement};
}

// A warp breaks the stick as if it were whole when it comes to the warp's keys; what the newer keys
// leave of it is multiplied in at the end. The part of the stick that a warp sees is never shorter
// than the true one, so it is safe to compare it with skip_epsilon.
template <int kPer>
__global__ void __launch_bounds__(kThreads)
    stickbreaking_decode_kernel(const StickBreakingDecode p) {
  __shared__ float sticks[kWarps];
  __shared__ float outputs[kWarps][32 * kPer];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int d = p.t.head_dim;
  const CachedHead head(p.t);
  const float* gates = p.gate_cache == nullptr
                           ? nullptr
                           : p.gate_cache + head.batch * p.t.capacity * p.t.heads + head.head;
  Channels<kPer> q(head.q, d, lane);
  q.scale(p.t.scale);
  const Range keys = warp_keys(0, p.attend_current ? head.length : head.length - 1, warp);
  float stick = 1.0f;
  Channels<kPer> o;
  for (int64_t end = keys.end; end > keys.begin && !(stick < p.skip_epsilon); end -= kBatch) {
    Channels<kPer> k[kBatch];
    Channels<kPer> v[kBatch];
    float gate[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t key = max(end - 1 - b, keys.begin);
      k[b] = Channels<kPer>(head.k + key * head.width, d, lane);
      v[b] = Channels<kPer>(head.v + key * head.width, d, lane);
      gate[b] = gates == nullptr ? 1.0f : gates[key * p.t.heads];
    }
    float z[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) z[b] = q.dot(k[b]);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (end - 1 - b < keys.begin) continue;
      const Break piece = break_at(z[b], gate[b]);
      o.add(piece.beta * stick, v[b]);
      stick *= piece.rest;
    }
  }
  if (lane == 0) sticks[warp] = stick;
  for (int j = 0; j < kPer; ++j) outputs[warp][lane + 32 * j] = o.value[j];
  __syncthreads();
  const bf16* own_value = head.v + (head.length - 1) * head.width;
  for (int c = threadIdx.x; c < d; c += kThreads) {
    float y = 0.0f;
    float left = 1.0f;
    for (int w = kWarps - 1; w >= 0; --w) {
      y += left * outputs[w][c];
      left *= sticks[w];
    }
    if (p.remainder_value) y += left * to_float(own_value[c]);
    if (p.remainder_bias != nullptr) y += left * to_float(p.remainder_bias[head.head * d + c]);
    head.o[c] = __float2bfloat16_rn(y);
  }
}

// Calls launch(grid, kPer), where kPer channels in each lane are enough for one head.
template <typename Launch>
void for_head(const char* name, const Decode& t, Launch&& launch) {
  if (t.head_dim > kMaxDecodeHeadDim) {
    throw std::invalid_argument(std::string(name) + ": heads of " + std::to_string(t.head_dim) +
                                " channels, at most " + std::to_string(kMaxDecodeHeadDim));
  }
  if (t.batch == 0 || t.heads == 0) return;
  const dim3 grid(static_cast<unsigned>(t.heads), static_cast<unsigned>(t.batch));
  if (t.head_dim <= 64) {
    launch(grid, Int<2>{});
  } else if (t.head_dim <= 128) {
    launch(grid, Int<4>{});
  } else {
    launch(grid, Int<8>{});
  }
  check_launch(name);
}

template <typename Bias>
void softmax_decode_with(cudaStream_t stream, const char* name, const SoftmaxDecode& p,
                         const Bias& bias) {
  for_head(name, p.t, [&](dim3 grid, auto per) {
    softmax_decode_kernel<decltype(per)::value, Bias><<<grid, kThreads, 0, stream>>>(p, bias);
  });
}

}  // namespace

void cache_append(cudaStream_t stream, const CacheAppend& p) {
  p.type == Type::kF32 ? append<float>(stream, p) : append<bf16>(stream, p);
}

void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p) {
  softmax_decode_with(stream, "softmax_decode", p, NoBias{});
}

void alibi_decode(cudaStream_t stream, const SoftmaxDecode& p, const AlibiSlopes& slopes) {
  softmax_decode_with(stream, "alibi_decode", p, AlibiBias{slopes});
}

void fire_decode(cudaStream_t stream, const SoftmaxDecode& p, const FireParameters& parameters) {
  softmax_decode_with(stream, "fire_decode", p, FireBias{parameters});
}

void stickbreaking_decode(cudaStream_t stream, const StickBreakingDecode& p) {
  for_head("stickbreaking_decode", p.t, [&](dim3 grid, auto per) {
    stickbreaking_decode_kernel<decltype(per)::value><<<grid, kThreads, 0, stream>>>(p);
  });
}

}  // namespace sbtrain::kernels
