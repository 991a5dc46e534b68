#include "kernels/attention/launch_softmax_hopper.cuh"
#include "kernels/attention/score_scaled.cuh"

namespace sbtrain::kernels {

void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* /*scratch*/,
                            void* scheduler) {
  launch_softmax_forward_hopper("softmax_forward", stream, p, ScaledScore{p.scale * kLog2e},
                                scheduler);
}

void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler) {
  launch_softmax_backward_hopper("softmax_backward", stream, p, ScaledScore{p.scale * kLog2e},
                                 static_cast<float*>(scratch), scheduler);
}

}  // namespace sbtrain::kernels
