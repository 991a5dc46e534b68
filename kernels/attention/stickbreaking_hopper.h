// Stick-breaking attention for GPUs of compute capability 9.0, with wgmma and TMA: the problems of
// stickbreaking.h whose heads have 32, 64 or 128 channels and whose packs have at least
// kHopperTokens tokens. It saves what the portable kernels save, so either backward pass may follow
// either forward pass.
#pragma once

#include "kernels/attention/scratch_sizes.h"
#include "kernels/attention/stickbreaking.h"

namespace sbtrain::kernels {

// Writes o, log2_rem and stop, the same bits on every run. `scratch` has
// stickbreaking_hopper_forward_scratch_bytes (scratch_sizes.h).
void stickbreaking_forward_hopper(cudaStream_t stream, const StickBreakingProblem& problem,
                                  void* scratch);

// Writes dq, dk, dv and dgate, the same bits on every run. The workspace of the problem is that of
// stickbreaking_hopper_backward_scratch().
void stickbreaking_backward_hopper(cudaStream_t stream, const StickBreakingProblem& problem);

// The same in a single pass, of heads of 32 and 64 channels. The workspace of the problem is that
// of stickbreaking_single_pass_scratch(), of workspace_heads heads at a time.
void stickbreaking_backward_single_pass(cudaStream_t stream, const StickBreakingProblem& problem);

// The same as stickbreaking_far_forward and stickbreaking_far_backward of stickbreaking.h.
// `scratch` has tile_scheduler_bytes, and the workspace is that of stickbreaking_far_scratch().
void stickbreaking_far_forward_hopper(cudaStream_t stream, const StickBreakingProblem& problem,
                                      void* scratch);
void stickbreaking_far_backward_hopper(cudaStream_t stream, const StickBreakingProblem& problem);

// The latter in a single pass, of heads of 32 and 64 channels that have keys of their own. The
// workspace is that of stickbreaking_single_pass_scratch(), of workspace_heads heads at a time.
void stickbreaking_far_backward_single_pass(cudaStream_t stream,
                                            const StickBreakingProblem& problem);

}  // namespace sbtrain::kernels
