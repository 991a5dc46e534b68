// What receives the remainder of sticks after the keys of all ranks (ops/far_keys.h), for problems
// with kValue or kBias. Source: stickbreaking_remainder.cu.
#pragma once

#include "kernels/attention/stickbreaking.h"

namespace sbtrain::kernels {

// far.o_j += rem_j (v_j or r_h).
void stickbreaking_add_remainder(cudaStream_t stream, const StickBreakingProblem& problem);
// far.w_j = do_j . (v_j or r_h).
void stickbreaking_remainder_gradient(cudaStream_t stream, const StickBreakingProblem& problem);
// far.dv_j += rem_j do_j, summed over the heads that share v_j, in their order.
void stickbreaking_remainder_values(cudaStream_t stream, const StickBreakingProblem& problem);

}  // namespace sbtrain::kernels
