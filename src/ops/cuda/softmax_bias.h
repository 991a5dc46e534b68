// The ops of ops/softmax_bias.h on CUDA, by the portable kernels.
#pragma once

#include "ops/softmax_bias.h"

namespace sbtrain::ops::cuda {

void softmax_bias_forward(Stream& s, const SoftmaxForward& t, const SoftmaxBias& bias,
                          const Sequences& sequences, const SoftmaxParams& params);
void softmax_bias_backward(Stream& s, const SoftmaxBackward& t, const SoftmaxBias& bias,
                           const FireTensors& dfire, const Sequences& sequences,
                           const SoftmaxParams& params);
void softmax_bias_decode(Stream& s, const DecodeTensors& t, const SoftmaxBias& bias,
                         const SoftmaxParams& params);

}  // namespace sbtrain::ops::cuda
