#include "kernels/attention/launch_alibi.cuh"
#include "kernels/attention/launch_softmax_hopper.cuh"

namespace sbtrain::kernels {

void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* /*scratch*/,
                            void* scheduler, const AlibiSlopes& slopes) {
  constexpr const char* kName = "alibi_forward";
  launch_softmax_forward_hopper(kName, stream, p, alibi_score(kName, p, slopes), scheduler);
}

void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler, const AlibiSlopes& slopes) {
  constexpr const char* kName = "alibi_backward";
  launch_softmax_backward_hopper(kName, stream, p, alibi_score(kName, p, slopes),
                                 static_cast<float*>(scratch), scheduler);
}

}  // namespace sbtrain::kernels
