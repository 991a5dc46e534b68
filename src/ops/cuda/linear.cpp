#include "ops/linear.h"

#include "kernels/skinny_gemm.h"
#include "ops/activation.h"
#include "ops/cuda/context.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/run.h"

namespace sbtrain::ops::cuda {
namespace {

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

void gemm(Stream& s, const Gemm& g, const Tensor& workspace) {
  Context& c = context(s);
  c.tuner.run(c.blas, c.stream, g, workspace, s.tuning());
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

void run(Cuda, Stream& s, const LinearBackward& op, const LinearBackward::Scratch& scratch) {
  const auto weight = [&](const Buffer& workspace) {
    gemm(s,
         {.y = op.dw_NK,
          .a = op.dy_TN,
          .b = op.x_TK,
          .transpose_a = true,
          .alpha = op.alpha,
          .beta = op.accumulate_dw ? 1.0f : 0.0f},
         workspace);
  };
  const auto input = [&](const Buffer& workspace) {
    gemm(s,
         {.y = op.dx_TK,
          .a = op.dy_TN,
          .b = op.w_NK,
          .alpha = op.alpha,
          .beta = op.accumulate_dx ? 1.0f : 0.0f},
         workspace);
  };
  if (!op.dx_TK.defined()) return weight(scratch.workspace);
  if (!op.dw_NK.defined()) return input(scratch.workspace);
  const bool in_place = op.dx_TK.data == op.x_TK.data || op.dx_TK.data == op.dy_TN.data;
  const Buffer none;
  run_both(s, scratch.workspace, in_place ? none : scratch.second, weight, input);
}

}  // namespace sbtrain::ops::cuda
