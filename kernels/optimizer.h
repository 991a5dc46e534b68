// Reductions in double and AdamW. What one computes for another stays on the device, in the f64
// array `stats`, which StepStat indexes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/limits.h"
#include "kernels/step_stats.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// *out += sum of x [rows, cols] f32, or of its squares. The order depends only on the shape; a
// non-finite element gives a non-finite sum. Source: optimizer.cu.
struct Reduction {
  double* out;
  Matrix<const float> x;
  int64_t rows, cols;
  double* scratch;  // [kSumParts]
};
void sum(cudaStream_t stream, const Reduction& p);
void squared_norm(cudaStream_t stream, const Reduction& p);

// Computes from the sums of all ranks: kApply = loss and norm are finite; if so, kUpdates += 1;
// kGradScale = (clip / norm where clip > 0 and norm > clip, else 1) / n, where n is kValidTargets,
// at least 1, and norm that of the mean's gradient, sqrt(kSquaredNorm) / n; kBias1 and kBias2.
struct FinishStep {
  double* stats;
  double beta1, beta2, clip;
};
void finish_step(cudaStream_t stream, const FinishStep& p);

// AdamW (arXiv 1711.05101) on n elements, all f32 but the copy:
//   g = kGradScale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / kBias1 / (sqrt(v / kBias2) + eps) + decay * w)
// decay is that of the segment an element lies in, 0 outside all. Where kApply is 0 nothing
// changes.
struct DecaySegment {
  int64_t begin, end;
  float decay;
};
struct AdamW {
  float* w;
  float* m;
  float* v;
  const float* grad;
  __nv_bfloat16* w_bf16;  // copy of the new weights, may be null
  int64_t n;
  const double* stats;
  float lr, beta1, beta2, eps;
  int segment_count;
  DecaySegment segments[kMaxDecaySegments];  // sorted, disjoint
};
void adamw(cudaStream_t stream, const AdamW& p);

}  // namespace sbtrain::kernels
