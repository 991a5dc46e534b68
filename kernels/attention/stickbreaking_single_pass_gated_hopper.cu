// The stick-breaking backward pass in a single pass for sm_90a with gates.
#include "kernels/attention/launch_stickbreaking_single_pass_hopper.cuh"

namespace sbtrain::kernels {

void stickbreaking_backward_single_pass_gated(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_single_pass_of<Gated>(stream, p);
}

}  // namespace sbtrain::kernels
