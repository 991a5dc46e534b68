#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax.cuh"

namespace sbtrain::kernels {

void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* /*scratch*/,
                     const AlibiSlopes& slopes) {
  launch_softmax_forward("alibi_forward", stream, p, alibi_score("alibi_forward", p, slopes));
}

void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                      const AlibiSlopes& slopes) {
  launch_softmax_backward("alibi_backward", stream, p, alibi_score("alibi_backward", p, slopes),
                          static_cast<float*>(scratch));
}

}  // namespace sbtrain::kernels
