// The ops of ops/gpt.h on the CPU.
#pragma once

#include "ops/gpt.h"

namespace sbtrain::ops::cpu {

void layernorm(Stream& s, const Tensor& y_TD, const Tensor& x_TD, const Tensor& w_D,
               const Tensor& b_D, float eps);
void layernorm_backward(Stream& s, const Tensor& dx_TD, const Tensor& dw_D, const Tensor& db_D,
                        const Tensor& dy_TD, const Tensor& x_TD, const Tensor& w_D, float eps,
                        bool accumulate);
void add_bias(Stream& s, const Tensor& y_TN, const Tensor& b_N);
void bias_gelu(Stream& s, const Tensor& y_TF, const Tensor& x_TF, const Tensor& b_F);
void bias_gelu_backward(Stream& s, const Tensor& dx_TF, const Tensor& dy_TF, const Tensor& x_TF,
                        const Tensor& b_F);

}  // namespace sbtrain::ops::cpu
