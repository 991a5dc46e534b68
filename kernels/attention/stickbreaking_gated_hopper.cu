// The backward pass of stick-breaking attention with gates for sm_90a.
#include "kernels/attention/launch_stickbreaking_hopper.cuh"

namespace sbtrain::kernels {

void stickbreaking_backward_gated(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_backward_of<Gated>(stream, p);
}

}  // namespace sbtrain::kernels
