#include "core/error.h"
#include "kernels/activation.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/gemm.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

int alignment_of(const Tensor& t) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(t.data) |
                         static_cast<uintptr_t>(t.row_stride) * dtype_size(t.dtype);
  int alignment = 16;
  while (alignment > 2 && bits % static_cast<uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}

}  // namespace

// cuBLASLt sees column-major matrices: a row-major y = a b is y^T = b^T a^T there, so b comes
// first.
void gemm(Stream& s, const Gemm& g, const Tensor& workspace) {
  const Tensor& c = g.c.defined() ? g.c : g.y;
  require(g.a.dtype == DType::kBF16 && g.b.dtype == DType::kBF16 && c.dtype == g.y.dtype,
          "matrix product of {} and {} into {} with {}", dtype_name(g.a.dtype),
          dtype_name(g.b.dtype), dtype_name(g.y.dtype), dtype_name(c.dtype));
  if (g.y.numel() == 0) return;
  const GemmShape shape{
      .transpose_a = g.transpose_b,
      .transpose_b = g.transpose_a,
      .m = g.y.cols(),
      .n = g.y.rows(),
      .k = g.transpose_a ? g.a.rows() : g.a.cols(),
      .lda = g.b.row_stride,
      .ldb = g.a.row_stride,
      .ldc = c.row_stride,
      .ldd = g.y.row_stride,
      .f32_output = g.y.dtype == DType::kF32,
      .adds = g.beta != 0,
      .alignment =
          std::min({alignment_of(g.a), alignment_of(g.b), alignment_of(c), alignment_of(g.y)}),
  };
  Context& x = context(s);
  x.tuner.run(x.blas, x.stream, shape,
              {.alpha = g.alpha,
               .beta = g.beta,
               .a = g.b.data,
               .b = g.a.data,
               .c = c.data,
               .d = g.y.data,
               .workspace = workspace.data,
               .workspace_bytes = workspace.bytes()},
              s.tuning());
}

void add_choices(Stream& s, const std::string& known) {
  context(s).tuner.add(known);
}

std::string keep_choices(Stream& s) {
  const GemmTuner& tuner = context(s).tuner;
  tuner.save();
  return tuner.text();
}

void linear(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, const LinearOptions& options) {
  const Buffer workspace = linear_workspace(s);
  gemm(s,
       {.y = y_TN,
        .a = x_TK,
        .b = w_NK,
        .transpose_b = true,
        .alpha = options.alpha,
        .beta = options.residual.defined() ? 1.0f : 0.0f,
        .c = options.residual},
       workspace);
}

void linear_backward_input(Stream& s, Tensor dx_TK, Tensor dy_TN, Tensor w_NK, float alpha,
                           bool accumulate) {
  const Buffer workspace = linear_workspace(s);
  gemm(s, {.y = dx_TK, .a = dy_TN, .b = w_NK, .alpha = alpha, .beta = accumulate ? 1.0f : 0.0f},
       workspace);
}

void linear_backward_weight(Stream& s, Tensor dw_NK, Tensor dy_TN, Tensor x_TK, float alpha) {
  const Buffer workspace = linear_workspace(s);
  gemm(s, {.y = dw_NK, .a = dy_TN, .b = x_TK, .transpose_a = true, .alpha = alpha, .beta = 1.0f},
       workspace);
}

void bias_backward(Stream& s, Tensor db_N, Tensor dy_TN) {
  const Buffer scratch = token_partials(s, dy_TN.cols());
  kernels::bias_backward(cuda_stream(s), {.db = db_N.f32(),
                                          .dy = bf16(dy_TN),
                                          .dy_stride = dy_TN.row_stride,
                                          .rows = dy_TN.rows(),
                                          .cols = dy_TN.cols(),
                                          .scratch = scratch.tensor().f32()});
}

}  // namespace sbtrain::ops::cuda
