// The stick-breaking backward pass in a single pass for sm_90a over the keys of another rank. With
// heads of 32 channels the compiler would find too few registers to let products run in the
// background.
#include "kernels/attention/launch_stickbreaking_single_pass_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {

void stickbreaking_far_backward_single_pass(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.far.queries == 0 || p.far.key == p.tokens) return;
  if (p.head_dim != 64) {
    throw_invalid_argument(
        "stickbreaking_far_backward: a single pass takes heads of 64 channels, not %d", p.head_dim);
  }
  launch_single_pass<Far<SinglePassShape<64>>>(stream, p);
}

}  // namespace sbtrain::kernels
