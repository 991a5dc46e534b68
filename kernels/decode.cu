#include "kernels/decode.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/primitives/dependent_launch.cuh"

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

using namespace cached;

constexpr int64_t kManyBlocks = 264;  // two for each multiprocessor of an H200

// Block (h, b, z) computes head h of sequence b, together with the other blocks of that head.
template <int kLanes, bool kVectors, bool kMany, typename Attention>
__global__ void __launch_bounds__(kThreads, kMany ? 3 : 2)
    decode_kernel(const __grid_constant__ Attention attention) {
  let_next_kernel_begin();
  attend_cached<kLanes, kVectors, kMany ? kBatch / 2 : kBatch>(
      attention,
      {static_cast<int>(blockIdx.x), blockIdx.y, attention.p.t.lengths[blockIdx.y],
       static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)},
      [] { wait_for_previous_kernel(); });
}
template <int kLanes, typename Attention>
void launch(const char* name, cudaStream_t stream, const Attention& attention) {
  const Decode& t = attention.p.t;
  const dim3 grid(static_cast<unsigned>(t.heads), static_cast<unsigned>(t.batch),
                  static_cast<unsigned>(blocks_of_head(t)));
  const auto launch_kernel = [&](auto kernel) {
    launch_early(name, t.early, stream, kernel, {grid, kThreads}, attention);
  };
  // While there are few blocks, each of them has many keys under way; many blocks have more of them
  // on a multiprocessor instead.
  const bool many = t.heads * t.batch > kManyBlocks;
  if (!has_vectors(t)) {
    launch_kernel(decode_kernel<kLanes, false, false, Attention>);
  } else if (many) {
    launch_kernel(decode_kernel<kLanes, true, true, Attention>);
  } else {
    launch_kernel(decode_kernel<kLanes, true, false, Attention>);
  }
}

// With the fewest lanes that hold one head.
template <typename Attention>
void decode(const char* name, cudaStream_t stream, const Attention& attention) {
  const Decode& t = attention.p.t;
  if (t.head_dim > kMaxDecodeHeadDim) {
    throw std::invalid_argument(std::string(name) + ": heads of " + std::to_string(t.head_dim) +
                                " channels, at most " + std::to_string(kMaxDecodeHeadDim));
  }
  if (t.batch == 0 || t.heads == 0) return;
  if (t.head_dim <= 32) return launch<4>(name, stream, attention);
  if (t.head_dim <= 64) return launch<8>(name, stream, attention);
  if (t.head_dim <= 128) return launch<16>(name, stream, attention);
  launch<32>(name, stream, attention);
}

}  // namespace

void cache_append(cudaStream_t stream, const CacheAppend& p) {
  p.type == Type::kF32 ? append<float>(stream, p) : append<bf16>(stream, p);
}

void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p) {
  decode("softmax_decode", stream, Softmax<NoBias>{p, {}});
}

void alibi_decode(cudaStream_t stream, const SoftmaxDecode& p, const AlibiSlopes& slopes) {
  decode("alibi_decode", stream, Softmax<AlibiBias>{p, {slopes}});
}

void fire_decode(cudaStream_t stream, const SoftmaxDecode& p, const FireParameters& parameters) {
  decode("fire_decode", stream, Softmax<FireBias>{p, {parameters}});
}

void stickbreaking_decode(cudaStream_t stream, const StickBreakingDecode& p) {
  decode("stickbreaking_decode", stream, StickBreaking{p});
}

}  // namespace sbtrain::kernels
