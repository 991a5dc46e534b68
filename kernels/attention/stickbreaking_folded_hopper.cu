// Stick-breaking attention for sm_90a of queries that have been multiplied by scale * log2(e).
#include "kernels/attention/launch_stickbreaking_hopper.cuh"

namespace sbtrain::kernels {

void stickbreaking_forward_folded(cudaStream_t stream, const StickBreakingProblem& p,
                                  void* scratch) {
  launch_forward_of<Folded>(stream, p, scratch);
}

void stickbreaking_backward_folded(cudaStream_t stream, const StickBreakingProblem& p) {
  launch_backward_of<Folded>(stream, p);
}

}  // namespace sbtrain::kernels
