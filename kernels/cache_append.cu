#include "kernels/decode.h"
#include "kernels/elementwise.cuh"
#include "kernels/pack.cuh"

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

}  // namespace

void launch(cudaStream_t stream, const CacheAppend& p) {
  p.type == Type::kF32 ? append<float>(stream, p) : append<bf16>(stream, p);
}

}  // namespace sbtrain::kernels
