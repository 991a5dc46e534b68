// A factor for each column of a matrix, and its gradient; ops/scale.h has the formulas, for members
// of the same names. Matrices and weights are bf16. Source: scale.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

struct Scale {
  Matrix<bf16> y;  // may be x
  Matrix<const bf16> x;
  const bf16* w;
  int64_t rows, cols;
};
struct ScaleBackward {
  Matrix<bf16> dx;  // may be dy
  float* dw;
  Matrix<const bf16> dy, x;
  const bf16* w;
  int64_t rows, cols;
  float* scratch = nullptr;  // [kTokenParts, cols]
};

void launch(cudaStream_t stream, const Scale& p);
void launch(cudaStream_t stream, const ScaleBackward& p);

}  // namespace sbtrain::kernels
