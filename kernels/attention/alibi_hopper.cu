#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax_hopper.cuh"
#include "kernels/attention/softmax_hopper.h"

namespace sbtrain::kernels {

void alibi_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes,
                          void* scheduler) {
  constexpr const char* kName = "alibi_forward";
  launch_softmax_forward_hopper(kName, stream, p, alibi_score(kName, p, slopes), scheduler);
}

void alibi_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes,
                           void* scratch, void* scheduler) {
  constexpr const char* kName = "alibi_backward";
  launch_softmax_backward_hopper(kName, stream, p, alibi_score(kName, p, slopes),
                                 static_cast<float*>(scratch), scheduler);
}

}  // namespace sbtrain::kernels
