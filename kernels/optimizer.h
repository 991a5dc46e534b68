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

// *out += the sum of squares of each of `count` arrays f32, one after the other, with the bits of
// squared_norm. Each has a multiple of 4 elements and begins at a multiple of 16 bytes.
struct SquaredNorms {
  double* out;
  int count;  // at most kMaxNormParts
  const float* x[kMaxNormParts];
  int64_t n[kMaxNormParts];
  double* scratch;  // [count, kSumParts]
};
void squared_norms(cudaStream_t stream, const SquaredNorms& p);

// Computes from the sums of all ranks: kSpike and, if the step is applied, the running loss, by the
// formulas of ops::FinishStep; kApply = loss and norm are finite, and no spike; if so,
// kUpdates += 1; kGradScale = (clip / norm where clip > 0 and norm > clip, else 1) / n, where n is
// kValidTargets, at least 1, and norm that of the mean's gradient, sqrt(kSquaredNorm) / n; kBias1
// and kBias2.
struct FinishStep {
  double* stats;
  double beta1, beta2, clip;
  double spike_sigma, spike_window;
};
void finish_step(cudaStream_t stream, const FinishStep& p);

// AdamW (arXiv 1711.05101) on each of several parts of n elements, all f32 but the copy:
//   g = kGradScale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / kBias1 / (sqrt(v / kBias2) + eps) + decay * w)
// decay is that of the part's segment an element lies in, 0 outside all. Where kApply is 0 nothing
// changes.
struct DecaySegment {
  int64_t begin, end;
  float decay;
};
struct AdamWPart {
  float* w;
  float* m;
  float* v;
  const float* grad;
  __nv_bfloat16* w_bf16;  // copy of the new weights, may be null
  int64_t n;
  int first_segment, end_segment;  // of the AdamW's
};
struct AdamW {
  const double* stats;
  float lr, beta1, beta2, eps;
  int part_count;
  AdamWPart parts[kMaxAdamWParts];
  DecaySegment segments[kMaxDecaySegments];  // of elements of their part, sorted, disjoint
};
void adamw(cudaStream_t stream, const AdamW& p);

}  // namespace sbtrain::kernels
