// The CPU backend: every op of ops/ops.h under the same name and with the same meaning. Callers
// use ops.h; its dispatcher has checked shapes and dtypes before it comes here.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops::cpu {

// memory.cpp
void fill(Stream& s, Tensor x, float value);
void copy(Stream& s, Tensor y, Tensor x);
void add(Stream& s, Tensor y, Tensor x);
void copy_from_host(Stream& s, Tensor y, const void* host);
void copy_to_host(Stream& s, void* host, Tensor x);

// embedding.cpp
void embedding(Stream& s, Tensor y_TD, Tensor tokens_T, Tensor w_VD, float scale);
void embedding_backward(Stream& s, Tensor dw_VD, Tensor dy_TD, Tensor tokens_T, float scale);

// norm.cpp
void rmsnorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, float eps);
void rmsnorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor dy_TD, Tensor x_TD, Tensor w_D,
                      float eps);
void head_norm(Stream& s, Tensor y_THd, Tensor x_THd, Tensor w_Hd, Tensor b_Hd, int heads,
               float eps);
void head_norm_backward(Stream& s, Tensor dx_THd, Tensor dw_Hd, Tensor db_Hd, Tensor dy_THd,
                        Tensor x_THd, Tensor w_Hd, int heads, float eps);

// linear.cpp
void linear(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, const LinearOptions& options);
void linear_backward_input(Stream& s, Tensor dx_TK, Tensor dy_TN, Tensor w_NK, float alpha,
                           bool accumulate);
void linear_backward_weight(Stream& s, Tensor dw_NK, Tensor dy_TN, Tensor x_TK, float alpha);
void bias_backward(Stream& s, Tensor db_N, Tensor dy_TN);

// activation.cpp
void swiglu(Stream& s, Tensor y_TF, Tensor gate_up_T2F);
void swiglu_backward(Stream& s, Tensor dgate_up_T2F, Tensor dy_TF, Tensor gate_up_T2F);
void bias_sigmoid(Stream& s, Tensor y_TH, Tensor x_TH, Tensor b_H);
void sigmoid_backward(Stream& s, Tensor dx_TH, Tensor dy_TH, Tensor y_TH);

// rope.cpp
void rope(Stream& s, Tensor x_THd, Tensor positions_T, const RopeParams& params);

// stickbreaking.cpp, softmax.cpp
void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params);
void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params);
void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params);
void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params);
void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params);
void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params);

// loss.cpp
void linear_cross_entropy(Stream& s, const CrossEntropy& t);

// optimizer.cpp
double squared_norm(Stream& s, Tensor x);
double sum(Stream& s, Tensor x);
void adamw(Stream& s, const AdamW& t);

}  // namespace sbtrain::ops::cpu
