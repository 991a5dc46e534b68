#include <algorithm>

#include "kernels/checksum.h"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kChecksumThreads = 256;
constexpr unsigned kChecksumBlocks = 1024;

// The finalizer of MurmurHash3: every bit of the result depends on every bit of `bits`.
__device__ uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdull;
  bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return bits ^ (bits >> 33);
}

template <typename Bits>
__global__ void checksum_kernel(uint64_t* sum, Matrix<const Bits> x, int64_t rows, int64_t cols) {
  uint64_t own = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kChecksumThreads;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChecksumThreads + threadIdx.x;
  for (int64_t i = begin; i < rows * cols; i += stride) {
    const uint64_t bits = x.row(i / cols)[i % cols];
    own += mixed(static_cast<uint64_t>(i) << 32 ^ bits);
  }
  own = lanes_sum<32>(own);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(own));
  }
}

template <typename Bits>
void checksum_typed(cudaStream_t stream, const Checksum& p) {
  const Matrix<const Bits> x{static_cast<const Bits*>(p.x.data), p.x.stride};
  const unsigned grid = std::min(blocks(p.rows * p.cols, kChecksumThreads), kChecksumBlocks);
  launch_early("checksum", /*early=*/false, stream, checksum_kernel<Bits>,
               {.grid = grid, .threads = kChecksumThreads}, p.sum, x, p.rows, p.cols);
}

}  // namespace

void launch(cudaStream_t stream, const Checksum& p) {
  if (p.rows * p.cols == 0) return;
  if (p.type == Type::kF32) return checksum_typed<uint32_t>(stream, p);
  if (p.type == Type::kBF16) return checksum_typed<uint16_t>(stream, p);
  throw_invalid_argument("checksum: no such type");
}

}  // namespace sbtrain::kernels
