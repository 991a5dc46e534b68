#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

void stickbreaking_far_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.gate) return stickbreaking_gated_far_forward(stream, p);
  launch_stickbreaking_far_forward<false>(stream, p);
}

}  // namespace sbtrain::kernels
