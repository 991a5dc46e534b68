#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

void stickbreaking_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.gate) return stickbreaking_gated_backward(stream, p);
  launch_stickbreaking_backward<false>(stream, p);
}

}  // namespace sbtrain::kernels
