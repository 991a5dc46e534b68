#include "ops/linear.h"

#include <algorithm>

#include "kernels/skinny_gemm.h"
#include "ops/activation.h"
#include "ops/cuda/context.h"
#include "ops/cuda/gemm.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/run.h"

namespace sbtrain::ops::cuda {
namespace {

int alignment_of(const Tensor& t) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(t.data) |
                         static_cast<uintptr_t>(t.row_stride) * dtype_size(t.dtype);
  int alignment = 16;
  while (alignment > 2 && bits % static_cast<uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}

void skinny_gemm(Stream& s, const DecodeLinear& op, const Tensor& normed_BK) {
  kernels::skinny_gemm(cuda_stream(s), {.type = op.y_BN.dtype,
                                        .y = op.y_BN,
                                        .x = op.x_BK,
                                        .w = op.w_NK,
                                        .residual = op.residual,
                                        .rows = op.y_BN.rows(),
                                        .n = op.y_BN.cols(),
                                        .k = op.x_BK.cols(),
                                        .alpha = op.alpha,
                                        .early = begins_early(s),
                                        .norm_w = op.norm_K,
                                        .norm_eps = op.norm_eps,
                                        .normed = normed_BK,
                                        .swiglu = op.swiglu});
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

void run(Cuda, Stream& s, const Linear& op, const Buffer& workspace) {
  if (op.y_TN.rows() <= kernels::kSkinnyRows) {
    return skinny_gemm(s,
                       {.y_BN = op.y_TN,
                        .x_BK = op.x_TK,
                        .w_NK = op.w_NK,
                        .alpha = op.alpha,
                        .residual = op.residual},
                       {});
  }
  gemm(s,
       {.y = op.y_TN,
        .a = op.x_TK,
        .b = op.w_NK,
        .transpose_b = true,
        .alpha = op.alpha,
        .beta = op.residual.defined() ? 1.0f : 0.0f,
        .c = op.residual},
       workspace);
}

void run(Cuda, Stream& s, const DecodeLinear& op, const DecodeLinear::Scratch& scratch) {
  if (!scratch.workspace.tensor().defined()) return skinny_gemm(s, op, scratch.normed_BK);
  const Tensor x = op.norm_K.defined() ? scratch.normed_BK.tensor() : op.x_BK;
  const Tensor y = op.swiglu ? scratch.gate_up_B2N.tensor() : op.y_BN;
  if (op.norm_K.defined()) {
    run(Cuda(), s, RmsNorm{.y_TD = x, .x_TD = op.x_BK, .w_D = op.norm_K, .eps = op.norm_eps});
  }
  run(Cuda(), s,
      Linear{.y_TN = y, .x_TK = x, .w_NK = op.w_NK, .alpha = op.alpha, .residual = op.residual},
      scratch.workspace);
  if (op.swiglu) run(Cuda(), s, Swiglu{.y_TF = op.y_BN, .gate_up_T2F = y});
}

void run(Cuda, Stream& s, const LinearBackwardInput& op, const Buffer& workspace) {
  gemm(s,
       {.y = op.dx_TK,
        .a = op.dy_TN,
        .b = op.w_NK,
        .alpha = op.alpha,
        .beta = op.accumulate ? 1.0f : 0.0f},
       workspace);
}

void run(Cuda, Stream& s, const LinearBackwardWeight& op, const Buffer& workspace) {
  gemm(s,
       {.y = op.dw_NK,
        .a = op.dy_TN,
        .b = op.x_TK,
        .transpose_a = true,
        .alpha = op.alpha,
        .beta = op.accumulate ? 1.0f : 0.0f},
       workspace);
}

void run(Cuda, Stream& s, const LinearBackward& op, const LinearBackward::Scratch& scratch) {
  const bool in_place = op.dx_TK.data == op.x_TK.data || op.dx_TK.data == op.dy_TN.data;
  const Buffer none;
  run_both(
      s, scratch.workspace, in_place ? none : scratch.second,
      [&](const Buffer& workspace) { run(Cuda(), s, op.weight(), workspace); },
      [&](const Buffer& workspace) { run(Cuda(), s, op.input(), workspace); });
}

}  // namespace sbtrain::ops::cuda
