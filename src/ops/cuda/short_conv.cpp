#include "kernels/short_conv.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

static_assert(kernels::kConvTaps == kShortConv);

kernels::ShortConvWeights weights(const ShortConvWeights& w) {
  return {.w = bf16(w.w_D3), .b = bf16(w.b_D), .gate_bias = bf16(w.gate_bias_D)};
}

}  // namespace

void short_conv_forward(Stream& s, const ShortConvForward& t, const ShortConvWeights& w) {
  kernels::short_conv(cuda_stream(s), {.y = bf16(t.y_TD),
                                       .y_stride = t.y_TD.row_stride,
                                       .u = bf16(t.u_TD),
                                       .u_stride = t.u_TD.row_stride,
                                       .gate = bf16(t.gate_TD),
                                       .gate_stride = t.gate_TD.row_stride,
                                       .positions = t.positions_T.i32(),
                                       .rows = t.u_TD.rows(),
                                       .cols = t.u_TD.cols(),
                                       .w = weights(w)});
}

void short_conv_backward(Stream& s, const ShortConvBackward& t, const ShortConvWeights& dw,
                         const ShortConvWeights& w) {
  const Buffer scratch = token_partials(s, kernels::kShortConvSums * t.u_TD.cols());
  kernels::short_conv_backward(cuda_stream(s), {.du = bf16(t.du_TD),
                                                .du_stride = t.du_TD.row_stride,
                                                .dgate = bf16(t.dgate_TD),
                                                .dgate_stride = t.dgate_TD.row_stride,
                                                .dw = dw.w_D3.f32(),
                                                .db = dw.b_D.f32(),
                                                .dgate_bias = dw.gate_bias_D.f32(),
                                                .dy = bf16(t.dy_TD),
                                                .dy_stride = t.dy_TD.row_stride,
                                                .u = bf16(t.u_TD),
                                                .u_stride = t.u_TD.row_stride,
                                                .gate = bf16(t.gate_TD),
                                                .gate_stride = t.gate_TD.row_stride,
                                                .positions = t.positions_T.i32(),
                                                .rows = t.u_TD.rows(),
                                                .cols = t.u_TD.cols(),
                                                .w = weights(w),
                                                .scratch = scratch.tensor().f32()});
}

void short_conv_decode(Stream& s, const ShortConvDecode& t, const ShortConvWeights& w) {
  kernels::short_conv_decode(cuda_stream(s), {.y = bf16(t.y_BD),
                                              .y_stride = t.y_BD.row_stride,
                                              .u = bf16(t.u_BD),
                                              .u_stride = t.u_BD.row_stride,
                                              .gate = bf16(t.gate_BD),
                                              .gate_stride = t.gate_BD.row_stride,
                                              .state = bf16(t.state_B2D),
                                              .state_stride = t.state_B2D.row_stride,
                                              .positions = t.positions_B.i32(),
                                              .rows = t.u_BD.rows(),
                                              .cols = t.u_BD.cols(),
                                              .w = weights(w)});
}

}  // namespace sbtrain::ops::cuda
