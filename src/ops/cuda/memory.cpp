#include "kernels/memory.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::Copy arguments(const char* op, const Tensor& y, const Tensor& x) {
  const auto real = [](const Tensor& t) {
    return t.dtype == DType::kF32 || t.dtype == DType::kBF16;
  };
  require(y.dtype == x.dtype || (real(y) && real(x)), "{}: no conversion from {} to {}", op,
          x.describe(), y.describe());
  return {.y = y.data,
          .y_type = kernel_type(y.dtype),
          .y_stride = y.row_stride,
          .x = x.data,
          .x_type = kernel_type(x.dtype),
          .x_stride = x.row_stride,
          .rows = y.rows(),
          .cols = y.cols()};
}

}  // namespace

void fill(Stream& s, Tensor x, float value) {
  kernels::fill(cuda_stream(s), {.x = x.data,
                                 .type = kernel_type(x.dtype),
                                 .rows = x.rows(),
                                 .cols = x.cols(),
                                 .stride = x.row_stride,
                                 .value = value});
}

void copy(Stream& s, Tensor y, Tensor x) {
  kernels::copy(cuda_stream(s), arguments("copy", y, x));
}

void add(Stream& s, Tensor y, Tensor x) {
  kernels::add(cuda_stream(s), arguments("add", y, x));
}

}  // namespace sbtrain::ops::cuda
