#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

void stickbreaking_far_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.gate) return stickbreaking_gated_far_backward(stream, p);
  launch_stickbreaking_far_backward<false>(stream, p);
}

}  // namespace sbtrain::kernels
