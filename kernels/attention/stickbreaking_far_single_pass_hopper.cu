// The stick-breaking backward pass in a single pass for sm_90a over the keys of another rank.
#include "kernels/attention/launch_stickbreaking_single_pass_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {

void stickbreaking_far_backward_single_pass(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.far.queries == 0 || p.far.key == p.tokens) return;
  launch_single_pass_of<Far>(stream, p);
}

}  // namespace sbtrain::kernels
