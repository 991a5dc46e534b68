// Cross-entropy of one chunk of logits, and its gradient.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// What ops::CrossEntropy computes of logits [rows, vocab] f32: loss and hits [rows] f32, and the
// gradient dlogits [rows, vocab] bf16, which does not overlap logits. Targets are i32 below vocab:
// other values stop the kernel. Source: cross_entropy.cu.
struct CrossEntropy {
  float* loss;
  float* hits = nullptr;  // may be null
  Matrix<bf16> dlogits;   // may be null
  Matrix<const float> logits;
  const int32_t* targets;
  int64_t rows, vocab;
  float loss_weight, z_loss;
};
void launch(cudaStream_t stream, const CrossEntropy& p);

}  // namespace sbtrain::kernels
