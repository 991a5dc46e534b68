// What the launches of softmax attention with ALiBi share.
#pragma once

#include "kernels/attention/score_alibi.cuh"
#include "kernels/attention/softmax.h"
#include "kernels/errors.h"
#include "kernels/primitives/math.cuh"

namespace sbtrain::kernels {

inline AlibiScore alibi_score(const char* name, const SoftmaxProblem& p,
                              const AlibiSlopes& slopes) {
  if (p.heads > kMaxAlibiHeads) {
    throw_invalid_argument("%s: %d heads, at most %d", name, p.heads,
                           static_cast<int>(kMaxAlibiHeads));
  }
  AlibiScore score{p.scale * kLog2e, slopes};
  for (float& slope : score.slopes_log2.of_head) slope *= kLog2e;
  return score;
}

}  // namespace sbtrain::kernels
