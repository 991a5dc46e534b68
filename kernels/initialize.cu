#include "kernels/initialize.h"
#include "kernels/launch.h"

namespace sbtrain::kernels {
namespace {

constexpr int kInitializeThreads = 256;

__device__ void store(float* x, float value) {
  *x = value;
}
__device__ void store(bf16* x, float value) {
  *x = __float2bfloat16_rn(value);
}

template <typename T>
__global__ void __launch_bounds__(kInitializeThreads) initialize_kernel(Initialize p) {
  const int64_t at = int64_t{blockIdx.x} * kInitializeThreads + threadIdx.x;
  if (at >= p.count) return;
  const int64_t row = (p.begin + at) / p.stored_cols;
  const int64_t col = p.begin + at - row * p.stored_cols;
  double value = 0.0;
  if (row < p.rows && col < p.cols) {
    value = p.value;
    if (p.normal) value *= philox_normal(p.random, static_cast<uint64_t>(row * p.cols + col));
  }
  store(static_cast<T*>(p.x) + at, static_cast<float>(value));
}

}  // namespace

void launch(cudaStream_t stream, const Initialize& p) {
  if (p.count == 0) return;
  const unsigned grid = blocks(p.count, kInitializeThreads);
  switch (p.type) {
    case Type::kF32:
      initialize_kernel<float><<<grid, kInitializeThreads, 0, stream>>>(p);
      break;
    case Type::kBF16:
      initialize_kernel<bf16><<<grid, kInitializeThreads, 0, stream>>>(p);
      break;
    default:
      throw_invalid_argument("initialize: x must be f32 or bf16");
  }
  check_launch("initialize");
}

}  // namespace sbtrain::kernels
