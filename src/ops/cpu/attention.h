// CPU attention: the ops of the attention section of ops/ops.h, fp32, blockwise. The dispatcher
// has checked shapes and dtypes.
//
// Each op takes its scratch by the function beside it, which the dispatcher calls too when only
// memory is planned. Its size depends on the threads, head_dim and max_seqlen alone, never on the
// documents at hand.
#pragma once

#include <cstdint>

#include "ops/ops.h"

namespace sbtrain::ops::cpu {

// stickbreaking.cpp
Buffer stickbreaking_forward_scratch(const Stream& s, int64_t head_dim);
Buffer stickbreaking_backward_scratch(const Stream& s, int64_t head_dim, int64_t max_seqlen);
void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params);
void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params);
void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params);

// softmax.cpp
Buffer softmax_forward_scratch(const Stream& s, int64_t head_dim);
Buffer softmax_backward_scratch(const Stream& s, int64_t head_dim);
void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params);
void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params);
void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params);

// attention_tile.cpp
void cache_append(Stream& s, const Tensor& cache_BCN, const Tensor& x_BN,
                  const Tensor& positions_B);

}  // namespace sbtrain::ops::cpu
