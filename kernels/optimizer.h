// Reductions in double and AdamW. What one computes for another stays on the device, in the f64
// array `stats`, which StepStat indexes.
#pragma once

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// The numbers of an optimizer step, f64 on the device, so that no step waits for the host.
enum StepStat : uint8_t {
  // A rank's contributions, which one reduction turns into the sums of all ranks.
  kLossSum,       // nats, of the valid targets
  kSquaredNorm,   // of the gradients of that sum, before clipping
  kValidTargets,  // what the sums are divided by
  kStopRequests,  // ranks that were asked to save and stop
  kSaveRequests,  // ranks that were asked to save
  // What FinishStep makes of them, alike on every rank.
  kUpdates,       // applied so far
  kApply,         // 1: the update is to be applied; 0: the step is skipped
  kSpike,         // 1: it is skipped although loss and norm are finite, because the loss is a spike
  kGradScale,     // of the mean over the valid targets, and clipping
  kBias1,         // 1 - beta1^updates
  kBias2,         // 1 - beta2^updates
  kLossCount,     // losses of applied steps that the next two cover
  kLossMean,      // nats per target, running
  kLossVariance,  // running
  kStepStats,     // number of them
  kSummedStats = kUpdates,
};

// Partial sums of a reduction.
inline constexpr int64_t kSumParts = 1056;

// *out += sum of x [rows, cols] f32, or of its squares. The order depends only on the shape; a
// non-finite element gives a non-finite sum. Source: optimizer.cu.
struct Reduction {
  double* out;
  Matrix<const float> x;
  int64_t rows, cols;
  double* scratch = nullptr;  // [kSumParts]
};
struct Sum : Reduction {};
struct SquaredNorm : Reduction {};
void launch(cudaStream_t stream, const Sum& p);
void launch(cudaStream_t stream, const SquaredNorm& p);

// *out += the sum of squares of each of `count` arrays f32, one after the other, with the bits of
// SquaredNorm. Each has a multiple of 4 elements and begins at a multiple of 16 bytes.
struct SquaredNorms {
  double* out;
  int count;  // at most kMaxNormParts
  const float* x[kMaxNormParts];
  int64_t n[kMaxNormParts];
  double* scratch;  // [count, kSumParts]
};
void launch(cudaStream_t stream, const SquaredNorms& p);

// Computes all other numbers from the sums of all ranks, by the formulas of ops::FinishStep.
struct FinishStep {
  double* stats;
  double clip, beta1, beta2;
  double spike_sigma, spike_window;
};
void launch(cudaStream_t stream, const FinishStep& p);

// ops::AdamW on each of several parts of n elements, all f32 but the copy. Decay is that of the
// part's segment an element lies in, 0 outside all.
struct DecaySegment {
  int64_t begin, end;
  float decay;
};
struct AdamWPart {
  float *w, *m, *v;
  const float* grad;
  bf16* w_bf16;  // copy of the new weights, may be null
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
void launch(cudaStream_t stream, const AdamW& p);

}  // namespace sbtrain::kernels
