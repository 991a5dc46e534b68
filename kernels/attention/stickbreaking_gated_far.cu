// In a file of its own, for the time that it takes to compile.
#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

void stickbreaking_gated_far_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_stickbreaking_far_forward<true>(stream, p);
}

void stickbreaking_gated_far_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_stickbreaking_far_backward<true>(stream, p);
}

}  // namespace sbtrain::kernels
