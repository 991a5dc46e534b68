// Running averages of weights (ops/average.h). Source: average.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

struct AverageWeights {
  const double* stats;
  float decay;
  float* a;
  const float* w;
  int64_t n;
};
void launch(cudaStream_t stream, const AverageWeights& p);

}  // namespace sbtrain::kernels
