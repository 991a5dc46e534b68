// The stick-breaking backward pass in a single pass for sm_90a of queries that have been multiplied
// by scale * log2(e).
#include "kernels/attention/launch_stickbreaking_single_pass_hopper.cuh"

namespace sbtrain::kernels {

void stickbreaking_backward_single_pass_folded(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_single_pass_of<Folded>(stream, p);
}

}  // namespace sbtrain::kernels
