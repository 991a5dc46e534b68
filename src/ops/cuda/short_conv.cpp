#include "ops/short_conv.h"

#include "kernels/short_conv.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

static_assert(kernels::kConvTaps == kShortConv);

kernels::ShortConvWeights weights(const ShortConvWeights& w) {
  return {.w = arg(w.w_D3), .b = arg(w.b_D), .gate_bias = arg(w.gate_bias_D)};
}

}  // namespace

void run(Cuda, Stream& s, const ShortConvForward& op) {
  kernels::short_conv(cuda_stream(s), {.y = arg(op.y_TD),
                                       .u = arg(op.u_TD),
                                       .gate = arg(op.gate_TD),
                                       .positions = arg(op.positions_T),
                                       .rows = op.u_TD.rows(),
                                       .cols = op.u_TD.cols(),
                                       .w = weights(op.w)});
}

void run(Cuda, Stream& s, const ShortConvBackward& op, const Buffer& scratch) {
  kernels::short_conv_backward(cuda_stream(s), {.du = arg(op.du_TD),
                                                .dgate = arg(op.dgate_TD),
                                                .dw = arg(op.dw.w_D3),
                                                .db = arg(op.dw.b_D),
                                                .dgate_bias = arg(op.dw.gate_bias_D),
                                                .dy = arg(op.dy_TD),
                                                .u = arg(op.u_TD),
                                                .gate = arg(op.gate_TD),
                                                .positions = arg(op.positions_T),
                                                .rows = op.u_TD.rows(),
                                                .cols = op.u_TD.cols(),
                                                .w = weights(op.w),
                                                .scratch = arg(scratch)});
}

void run(Cuda, Stream& s, const ShortConvDecode& op) {
  kernels::short_conv_decode(cuda_stream(s), {.y = arg(op.y_BD),
                                              .u = arg(op.u_BD),
                                              .gate = arg(op.gate_BD),
                                              .state = arg(op.state_B2D),
                                              .positions = arg(op.positions_B),
                                              .rows = op.u_BD.rows(),
                                              .cols = op.u_BD.cols(),
                                              .w = weights(op.w)});
}

}  // namespace sbtrain::ops::cuda
