#include "ops/activation.h"

#include "kernels/activation.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Swiglu& op) {
  kernels::swiglu(cuda_stream(s), {.y = arg(op.y_TF),
                                   .gate_up = arg(op.gate_up_T2F),
                                   .rows = op.y_TF.rows(),
                                   .cols = op.y_TF.cols(),
                                   .early = begins_early(s)});
}

void run(Cuda, Stream& s, const SwigluBackward& op) {
  kernels::swiglu_backward(cuda_stream(s), {.dgate_up = arg(op.dgate_up_T2F),
                                            .dy = arg(op.dy_TF),
                                            .gate_up = arg(op.gate_up_T2F),
                                            .rows = op.dy_TF.rows(),
                                            .cols = op.dy_TF.cols()});
}

void run(Cuda, Stream& s, const BiasSigmoid& op) {
  kernels::bias_sigmoid(cuda_stream(s), {.y = arg(op.y_TH),
                                         .x = arg(op.x_TH),
                                         .b = arg(op.b_H),
                                         .rows = op.x_TH.rows(),
                                         .cols = op.x_TH.cols()});
}

void run(Cuda, Stream& s, const SigmoidBackward& op) {
  kernels::sigmoid_backward(cuda_stream(s), {.dx = arg(op.dx_TH),
                                             .dy = arg(op.dy_TH),
                                             .y = arg(op.y_TH),
                                             .rows = op.y_TH.rows(),
                                             .cols = op.y_TH.cols()});
}

void run(Cuda, Stream& s, const BiasGelu& op) {
  kernels::bias_gelu(cuda_stream(s), {.y = arg(op.y_TF),
                                      .x = arg(op.x_TF),
                                      .b = arg(op.b_F),
                                      .rows = op.x_TF.rows(),
                                      .cols = op.x_TF.cols()});
}

void run(Cuda, Stream& s, const BiasGeluBackward& op) {
  kernels::bias_gelu_backward(cuda_stream(s), {.dx = arg(op.dx_TF),
                                               .dy = arg(op.dy_TF),
                                               .x = arg(op.x_TF),
                                               .b = arg(op.b_F),
                                               .rows = op.x_TF.rows(),
                                               .cols = op.x_TF.cols()});
}

}  // namespace sbtrain::ops::cuda
