// Scratch of attention on the CPU, fp32 and blockwise. Its size depends only on the threads,
// head_dim and max_seqlen, never on the documents of a pack.
#pragma once

#include <cstdint>

#include "ops/rebased.h"

namespace sbtrain::ops::cpu {

// stickbreaking.cpp
Buffer stickbreaking_forward_scratch(const Stream& s, int64_t head_dim);
Buffer stickbreaking_backward_scratch(const Stream& s, int64_t head_dim, int64_t max_seqlen);

// softmax.cpp
Buffer softmax_forward_scratch(const Stream& s, int64_t head_dim);
Buffer softmax_backward_scratch(const Stream& s, int64_t head_dim);

// rebased.cpp: what either pass takes for each thread, for heads of `f` features and values of `e`
Buffer rebased_scratch(const Stream& s, int64_t f, int64_t e, const RebasedParams& params);

}  // namespace sbtrain::ops::cpu
