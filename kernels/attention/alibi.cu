#include <stdexcept>
#include <string>

#include "kernels/attention/launch_softmax.cuh"
#include "kernels/attention/score_alibi.cuh"
#include "kernels/attention/softmax_bias.h"

namespace sbtrain::kernels {
namespace {

AlibiScore score_of(const char* name, const SoftmaxProblem& p, const AlibiSlopes& slopes) {
  if (p.heads > kMaxAlibiHeads) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(p.heads) +
                                " heads, at most " + std::to_string(kMaxAlibiHeads));
  }
  AlibiScore score{p.scale * kLog2e, slopes};
  for (float& slope : score.slopes_log2.of_head) slope *= kLog2e;
  return score;
}

}  // namespace

void alibi_forward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes) {
  launch_softmax_forward("alibi_forward", stream, p, score_of("alibi_forward", p, slopes));
}

void alibi_backward(cudaStream_t stream, const SoftmaxProblem& p, const AlibiSlopes& slopes,
                    void* scratch) {
  launch_softmax_backward("alibi_backward", stream, p, score_of("alibi_backward", p, slopes),
                          static_cast<float*>(scratch));
}

}  // namespace sbtrain::kernels
