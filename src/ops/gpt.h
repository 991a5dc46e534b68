// What blocks of the GPT-2 kind have beyond the Llama layout: LayerNorm, biases and GELU.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops {

// y = (x - mean) / sqrt(var + eps) * w + b over each row (arXiv 1607.06450). Rows may be strided.
void layernorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, Tensor b_D, float eps);
// dx = gradient, or += with accumulate; dw, db += gradient. Statistics are recomputed from x.
void layernorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor db_D, Tensor dy_TD,
                        Tensor x_TD, Tensor w_D, float eps, bool accumulate);

// y_TN[t] += b_N. The gradient of b is ops::bias_backward.
void add_bias(Stream& s, Tensor y_TN, Tensor b_N);

// y = gelu(x + b) per column, gelu(z) = z Phi(z), exact (arXiv 1606.08415).
void bias_gelu(Stream& s, Tensor y_TF, Tensor x_TF, Tensor b_F);
// dx = dy gelu'(x + b); the gradient of b is the sum of its rows.
void bias_gelu_backward(Stream& s, Tensor dx_TF, Tensor dy_TF, Tensor x_TF, Tensor b_F);

}  // namespace sbtrain::ops
