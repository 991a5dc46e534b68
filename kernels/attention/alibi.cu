#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax.cuh"
#include "kernels/attention/softmax_bias.h"

namespace sbtrain::kernels {

void alibi_forward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes) {
  launch_softmax_forward("alibi_forward", stream, p, alibi_score("alibi_forward", p, slopes));
}

void alibi_backward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes,
                    void* scratch) {
  launch_softmax_backward("alibi_backward", stream, p, alibi_score("alibi_backward", p, slopes),
                          static_cast<float*>(scratch));
}

}  // namespace sbtrain::kernels
