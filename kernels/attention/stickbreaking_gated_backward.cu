// In a file of its own, for the time that it takes to compile.
#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

void stickbreaking_gated_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_stickbreaking_backward<true>(stream, p);
}

}  // namespace sbtrain::kernels
