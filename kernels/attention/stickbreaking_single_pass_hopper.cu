#include "kernels/attention/launch_stickbreaking_single_pass_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {

void stickbreaking_backward_single_pass(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.gate != nullptr) return stickbreaking_backward_single_pass_gated(stream, p);
  if (p.scale == kFoldedScale) return stickbreaking_backward_single_pass_folded(stream, p);
  launch_single_pass_of<Unfolded>(stream, p);
}

}  // namespace sbtrain::kernels
