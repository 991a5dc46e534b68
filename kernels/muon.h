// The elementwise parts of Muon (ops/muon.h). Source: muon.cu.
#pragma once

#include "kernels/optimizer.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

struct MuonMomentum {
  const double* stats;
  float momentum;
  bool nesterov;
  float* m;
  const float* grad;
  bf16* y;  // may be null
  int64_t n;
};
void launch(cudaStream_t stream, const MuonMomentum& p);

// y = x / (margin |x|) for the norm |x| of all n elements, and 0 where that is 0.
struct Normalize {
  bf16* y;
  const bf16* x;
  int64_t n;
  float margin;
  double* scratch = nullptr;  // [kSumParts]
};
void launch(cudaStream_t stream, const Normalize& p);

struct MuonUpdate {
  const double* stats;
  float lr, scale, decay;
  float* w;
  const bf16* y;
  bf16* w_bf16;  // copy of the new weights, may be null
  int64_t n;
};
void launch(cudaStream_t stream, const MuonUpdate& p);

}  // namespace sbtrain::kernels
