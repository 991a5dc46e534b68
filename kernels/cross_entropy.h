// Cross-entropy of one chunk of logits, and its gradient.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// loss [rows] f32 = lse - logit[target] (nats), 0 where target < 0. With dlogits, the gradient of
// loss_weight * sum (loss + z_loss lse^2):
//   dlogits [rows, vocab] bf16 = loss_weight * ((1 + 2 z_loss lse) softmax(logits) -
//   onehot(target))
// and zeros where target < 0. With hits, [rows] f32: 1 where the target's logit is larger than all
// others, else 0. logits [rows, vocab] f32 and dlogits do not overlap; targets i32
// below vocab: other values stop the kernel. Source: cross_entropy.cu.
struct CrossEntropy {
  float* loss;
  float* hits = nullptr;
  Matrix<bf16> dlogits;  // may be null
  Matrix<const float> logits;
  const int32_t* targets;
  int64_t rows, vocab;
  float loss_weight, z_loss;
};
void launch(cudaStream_t stream, const CrossEntropy& p);

}  // namespace sbtrain::kernels
