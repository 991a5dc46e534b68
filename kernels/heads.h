// Heads of keys and values that several heads of queries share (grouped-query attention,
// ops/heads.h), bf16: of `rows` rows, `heads` of queries and `groups` of keys. Source: heads.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

struct RepeatHeads {
  Matrix<bf16> y;
  Matrix<const bf16> x;
  int64_t rows;
  int heads, groups, head_dim;
};
struct RepeatHeadsBackward {
  Matrix<bf16> dx;
  Matrix<const bf16> dy;
  int64_t rows;
  int heads, groups, head_dim;
};
void launch(cudaStream_t stream, const RepeatHeads& p);
void launch(cudaStream_t stream, const RepeatHeadsBackward& p);

}  // namespace sbtrain::kernels
