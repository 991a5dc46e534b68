// The ops of ops/rebased.h on CUDA.
#pragma once

#include "ops/rebased.h"

namespace sbtrain::ops::cuda {

void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& sequences,
                     const RebasedParams& params);
void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& sequences,
                      const RebasedParams& params);
void rebased_state(Stream& s, Tensor state_Re, Tensor k_THf, Tensor v_THe,
                   const RebasedParams& params);
void rebased_decode(Stream& s, const RebasedDecode& t, const RebasedParams& params);

}  // namespace sbtrain::ops::cuda
