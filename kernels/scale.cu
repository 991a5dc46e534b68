#include <cuda_bf16.h>

#include "kernels/elementwise.cuh"
#include "kernels/scale.h"
#include "kernels/token_sums.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kScaleWidth = 8;
constexpr int kColumns = 256;  // of a block of the backward pass, one for each thread

template <int kWidth>
struct Factors {
  Pack<bf16, kWidth> a, b;
};

struct ScaleOp {
  Scale p;
  template <int kWidth>
  __device__ Factors<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.x.row(row) + col), load_pack<kWidth>(p.w + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Factors<kWidth>& loaded) const {
    auto y = convert<float>(loaded.a);
    const auto w = convert<float>(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] *= w[i];
    store_floats(p.y.row(row) + col, y);
  }
};

// Block (part, slice) writes dx of the part's rows, and the sums of dw over them.
__global__ void __launch_bounds__(kColumns) scale_backward_kernel(const ScaleBackward p) {
  const int64_t col = int64_t{blockIdx.y} * kColumns + threadIdx.x;
  if (col >= p.cols) return;
  const float w = __bfloat162float(p.w[col]);
  const int64_t end = first_row(p.rows, blockIdx.x + 1);
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t row = first_row(p.rows, blockIdx.x); row < end; ++row) {
    const float dy = __bfloat162float(p.dy.row(row)[col]);
    sum += dy * __bfloat162float(p.x.row(row)[col]);
    p.dx.row(row)[col] = __float2bfloat16(dy * w);
  }
  p.scratch[blockIdx.x * p.cols + col] = sum;
}

}  // namespace

void launch(cudaStream_t stream, const Scale& p) {
  launch_elementwise<kScaleWidth>(stream, "scale", p.rows, p.cols,
                                  vectors_fit<kScaleWidth>(p.y, p.x, p.w), ScaleOp{p});
}

void launch(cudaStream_t stream, const ScaleBackward& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const dim3 grid(kTokenParts, blocks(p.cols, kColumns));
  scale_backward_kernel<<<grid, kColumns, 0, stream>>>(p);
  check_launch("scale_backward");
  add_parts(stream, p.dw, p.scratch, p.cols, p.cols);
}

}  // namespace sbtrain::kernels
