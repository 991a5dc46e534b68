#include "kernels/attention/softmax.cuh"

namespace sbtrain::kernels {

cudaError_t softmax_forward(cudaStream_t stream, const SoftmaxProblem& p) {
  return forward(stream, p, ScaledScore{p.scale * kLog2e});
}

cudaError_t softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch) {
  return backward(stream, p, ScaledScore{p.scale * kLog2e}, static_cast<float*>(scratch));
}

}  // namespace sbtrain::kernels
