// Reductions in double and AdamW. What one op computes for another stays on the device.
#pragma once

#include <span>

#include "kernels/optimizer.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// The numbers of an optimizer step that stay on the device.
using kernels::StepStat;
using enum kernels::StepStat;

// Partial sums of a full reduction on the GPU.
inline Buffer reduction_partials(const Stream& s) {
  if (!on_cuda(s)) return {};
  return s.scratch("partial sums", DType::kF64, {kernels::kSumParts});
}

// y_1 (f64, on the device) += the sum of x (f32, any shape), in double and in a fixed order, so
// that it is the same on every run. Non-finite input gives a non-finite result.
struct AddSum {
  static constexpr std::string_view kName = "add_sum";
  Tensor y_1;
  Tensor x;
  void check() const {
    Check(kName).flat("y_1", y_1, 1, DType::kF64);
    Check(kName).matrix("x", x, x.rows(), x.cols(), DType::kF32);
  }
  Buffer scratch(const Stream& s) const { return reduction_partials(s); }
  kernels::Sum kernel() const { return {{y_1, x, x.rows(), x.cols()}}; }
};

// The same for the squares of x.
struct AddSquaredNorm {
  static constexpr std::string_view kName = "add_squared_norm";
  Tensor y_1;
  Tensor x;
  void check() const {
    Check(kName).flat("y_1", y_1, 1, DType::kF64);
    Check(kName).matrix("x", x, x.rows(), x.cols(), DType::kF32);
  }
  Buffer scratch(const Stream& s) const { return reduction_partials(s); }
  kernels::SquaredNorm kernel() const { return {{y_1, x, x.rows(), x.cols()}}; }
};

// The same for each of several x, f32 and without gaps between rows, in their order.
struct AddSquaredNorms {
  static constexpr std::string_view kName = "add_squared_norms";
  Tensor y_1;
  std::span<const Tensor> x{};
  void check() const;
  Buffer scratch(const Stream& s) const;
};

// Returns the sum of x; waits for the result.
double sum(Stream& s, const Tensor& x);

// Computes all other numbers of the step from its sums over all ranks (the first kSummedStats), and
// counts the update if it is to be applied. The gradients are those of the sum of the losses;
// kGradScale = (clip / norm where clip > 0 and norm > clip, else 1) / n makes them those of the
// mean over the valid targets, of which there are n, at least 1, with norm = sqrt(kSquaredNorm) /
// n.
//
// A step is skipped, kApply = 0, if its loss or squared norm is not finite, or if its loss x per
// target is a spike. With the count n, mean m and variance v of the losses of applied steps and the
// window N = spike_window, x is a spike if
//   spike_sigma > 0,  n >= N  and  x > m + spike_sigma sqrt(v),
// so that the first N applied steps are a warm-up without spikes. An applied step with valid
// targets continues m and v by
//   n' = n + 1,  a = 1 / min(n', N),  m' = m + a (x - m),  v' = (1 - a) (v + a (x - m)^2),
// which are the plain mean and variance of the first N losses (Welford, Technometrics 4, 1962) and
// an exponential window of N steps afterwards. Skipped losses do not count, so that a spike cannot
// make the next one pass.
struct FinishStep {
  static constexpr std::string_view kName = "finish_step";
  Tensor stats;  // f64 [kStepStats]
  double clip, beta1, beta2;
  double spike_sigma = 0, spike_window = 1;  // window: at least 1
  void check() const { Check(kName).flat("stats", stats, kStepStats, DType::kF64); }
  kernels::FinishStep kernel() const {
    return {stats, clip, beta1, beta2, spike_sigma, spike_window};
  }
};

// AdamW (arXiv 1711.05101) on one flat range of N elements, all f32, unless kApply is 0:
//   g = kGradScale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / kBias1 / (sqrt(v / kBias2) + eps) + decay * w)
struct DecayRange {
  int64_t begin = 0, end = 0;  // elements with weight decay
};
struct AdamW {
  static constexpr std::string_view kName = "adamw";
  Tensor w_N{}, m_N{}, v_N{}, grad_N{};
  Tensor compute_N{};                    // optional, the new weights in the compute type
  Tensor stats{};                        // f64 [kStepStats]
  std::span<const DecayRange> decays{};  // ascending; elsewhere there is no decay
  float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0;
  void check() const;
};

// The same on several ranges, which have the same stats and hyperparameters: on CUDA by few
// kernels.
struct AdamWs {
  static constexpr std::string_view kName = "adamw";
  std::span<const AdamW> ranges{};
  void check() const;
};

namespace cpu {
void run(Cpu, Stream& s, const AddSum& op, const Buffer& scratch);
void run(Cpu, Stream& s, const AddSquaredNorm& op, const Buffer& scratch);
void run(Cpu, Stream& s, const AddSquaredNorms& op, const Buffer& scratch);
void run(Cpu, Stream& s, const FinishStep& op);
void run(Cpu, Stream& s, const AdamW& op);
void run(Cpu, Stream& s, const AdamWs& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const AddSquaredNorms& op, const Buffer& scratch);
void run(Cuda, Stream& s, const AdamW& op);
void run(Cuda, Stream& s, const AdamWs& op);
}  // namespace cuda

}  // namespace sbtrain::ops
