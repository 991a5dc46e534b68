// The ops of ops/rebased.h on the CPU.
#pragma once

#include "ops/rebased.h"

namespace sbtrain::ops::cpu {

// What either pass takes for each thread, for heads of `f` features and values of `e`.
Buffer rebased_scratch(const Stream& s, int64_t f, int64_t e, const RebasedParams& params);
void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& sequences,
                     const RebasedParams& params);
void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& sequences,
                      const RebasedParams& params);
void rebased_state(Stream& s, const Tensor& state_Re, const Tensor& k_THf, const Tensor& v_THe,
                   const RebasedParams& params);
void rebased_decode(Stream& s, const RebasedDecode& t, const RebasedParams& params);

}  // namespace sbtrain::ops::cpu
