#include "kernels/activation.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {

void swiglu(Stream& s, Tensor y_TF, Tensor gate_up_T2F) {
  kernels::swiglu(cuda_stream(s), {.y = bf16(y_TF),
                                   .y_stride = y_TF.row_stride,
                                   .gate_up = bf16(gate_up_T2F),
                                   .gate_up_stride = gate_up_T2F.row_stride,
                                   .rows = y_TF.rows(),
                                   .cols = y_TF.cols()});
}

void swiglu_backward(Stream& s, Tensor dgate_up_T2F, Tensor dy_TF, Tensor gate_up_T2F) {
  kernels::swiglu_backward(cuda_stream(s), {.dgate_up = bf16(dgate_up_T2F),
                                            .dgate_up_stride = dgate_up_T2F.row_stride,
                                            .dy = bf16(dy_TF),
                                            .dy_stride = dy_TF.row_stride,
                                            .gate_up = bf16(gate_up_T2F),
                                            .gate_up_stride = gate_up_T2F.row_stride,
                                            .rows = dy_TF.rows(),
                                            .cols = dy_TF.cols()});
}

void bias_sigmoid(Stream& s, Tensor y_TH, Tensor x_TH, Tensor b_H) {
  kernels::bias_sigmoid(cuda_stream(s), {.y = y_TH.f32(),
                                         .y_stride = y_TH.row_stride,
                                         .x = x_TH.f32(),
                                         .x_stride = x_TH.row_stride,
                                         .b = bf16(b_H),
                                         .rows = x_TH.rows(),
                                         .cols = x_TH.cols()});
}

void sigmoid_backward(Stream& s, Tensor dx_TH, Tensor dy_TH, Tensor y_TH) {
  kernels::sigmoid_backward(cuda_stream(s), {.dx = bf16(dx_TH),
                                             .dx_stride = dx_TH.row_stride,
                                             .dy = bf16(dy_TH),
                                             .dy_stride = dy_TH.row_stride,
                                             .y = y_TH.f32(),
                                             .y_stride = y_TH.row_stride,
                                             .rows = y_TH.rows(),
                                             .cols = y_TH.cols()});
}

}  // namespace sbtrain::ops::cuda
