#include "kernels/attention/launch_softmax.cuh"
#include "kernels/attention/score_scaled.cuh"
#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* /*scratch*/) {
  launch_softmax_forward("softmax_forward", stream, p, ScaledScore{p.scale * kLog2e});
}

void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch) {
  launch_softmax_backward("softmax_backward", stream, p, ScaledScore{p.scale * kLog2e},
                          static_cast<float*>(scratch));
}

}  // namespace sbtrain::kernels
