// Drawing tokens from logits.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// y[b] = the index of the largest of the first `vocab` numbers of row b, the smallest of equals; -1
// if that number is not finite or one of them is NaN. Source: sampling.cu.
struct Argmax {
  int32_t* y;
  Matrix<const float> x;
  int64_t rows, vocab;
};
void launch(cudaStream_t stream, const Argmax& p);

}  // namespace sbtrain::kernels
