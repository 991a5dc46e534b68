// The ops of ops/gpt.h and ops/short_conv.h on CUDA.
#pragma once

#include "ops/gpt.h"
#include "ops/short_conv.h"

namespace sbtrain::ops::cuda {

void layernorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, Tensor b_D, float eps);
void layernorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor db_D, Tensor dy_TD,
                        Tensor x_TD, Tensor w_D, float eps, bool accumulate);
void add_bias(Stream& s, Tensor y_TN, Tensor b_N);
void bias_gelu(Stream& s, Tensor y_TF, Tensor x_TF, Tensor b_F);
void bias_gelu_backward(Stream& s, Tensor dx_TF, Tensor dy_TF, Tensor x_TF, Tensor b_F);

void short_conv_forward(Stream& s, const ShortConvForward& t, const ShortConvWeights& w);
void short_conv_backward(Stream& s, const ShortConvBackward& t, const ShortConvWeights& dw,
                         const ShortConvWeights& w);
void short_conv_decode(Stream& s, const ShortConvDecode& t, const ShortConvWeights& w);

}  // namespace sbtrain::ops::cuda
