// The whole vocabulary of operations. Each stands once here, with a CPU implementation that is
// the readable reference (ops/cpu/) and, where the build has CUDA, one of the same meaning beside
// it (ops/cuda/). Every op does nothing on Backend::kPlan except take its scratch, so that the
// memory plan is made by the real schedule.
//
// Tensors are views with the shapes their suffixes say (legend in core/tensor.h). On the CPU all
// reals are f32; on CUDA activations, their gradients and compute weights are bf16, weight
// gradients, statistics and what the optimizer keeps f32. `dx +=` means the op adds to what the
// tensor holds; `dx =` that it overwrites it. Errors: shapes or dtypes that do not fit throw
// ExitCode::kInternal, since the model is built from a validated configuration.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/sequences.h"
#include "core/stream.h"
#include "core/tensor.h"

namespace sbtrain::ops {

// ---- Memory -------------------------------------------------------------------------------

void fill(Stream& s, Tensor x, float value);
void copy(Stream& s, Tensor y, Tensor x);  // y = x, same shape; dtypes may differ
void add(Stream& s, Tensor y, Tensor x);   // y += x, same shape
// y contiguous, y.bytes() bytes; `host` may be reused at once.
void copy_from_host(Stream& s, Tensor y, const void* host);
void copy_to_host(Stream& s, void* host, Tensor x);  // waits until the bytes are there
void synchronize(Stream& s);

// Between these two, ops that have alternatives time them and keep the fastest; what they write is
// undefined. `known` are choices of an earlier run on such a device, which are kept; end_tuning()
// returns all that are known now ("" on backends without alternatives).
void begin_tuning(Stream& s, const std::string& known);
std::string end_tuning(Stream& s);

// ---- Embedding ------------------------------------------------------------------------------

// y_TD[t] = scale * w_VD[tokens_T[t]]; tokens i32 in [0, V).
void embedding(Stream& s, Tensor y_TD, Tensor tokens_T, Tensor w_VD, float scale);
// dw_VD[tokens_T[t]] += scale * dy_TD[t], in the order of t: deterministic.
void embedding_backward(Stream& s, Tensor dw_VD, Tensor dy_TD, Tensor tokens_T, float scale);

// ---- Normalisation ----------------------------------------------------------------------------

// y = x / sqrt(mean(x^2) + eps) * w  (RMSNorm, arXiv 1910.07467).
void rmsnorm(Stream& s, Tensor y_TD, Tensor x_TD, Tensor w_D, float eps);
// dx_TD += gradient, dw_D += gradient. Statistics are recomputed from x.
void rmsnorm_backward(Stream& s, Tensor dx_TD, Tensor dw_D, Tensor dy_TD, Tensor x_TD, Tensor w_D,
                      float eps);

// Normalisation of each token's each head over d: y = (x - mean) / sqrt(var + eps) * w + b, with
// one w and b per head and channel (head norm, arXiv 2410.17980). x and y are [T, H*d].
void head_norm(Stream& s, Tensor y_THd, Tensor x_THd, Tensor w_Hd, Tensor b_Hd, int heads,
               float eps);
// dx = gradient; dw, db += gradient.
void head_norm_backward(Stream& s, Tensor dx_THd, Tensor dw_Hd, Tensor db_Hd, Tensor dy_THd,
                        Tensor x_THd, Tensor w_Hd, int heads, float eps);

// ---- Linear -------------------------------------------------------------------------------------

struct LinearOptions {
  float alpha = 1.0f;  // y = alpha * x w^T + residual
  Tensor residual{};   // same shape as y, may be y itself
};
// y_TN = alpha * x_TK w_NK^T (+ residual_TN). x and y may have strided rows.
void linear(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, const LinearOptions& options = {});
// dx_TK = alpha * dy_TN w_NK, or += with accumulate.
void linear_backward_input(Stream& s, Tensor dx_TK, Tensor dy_TN, Tensor w_NK, float alpha = 1.0f,
                           bool accumulate = false);
// dw_NK += alpha * dy_TN^T x_TK.
void linear_backward_weight(Stream& s, Tensor dw_NK, Tensor dy_TN, Tensor x_TK, float alpha = 1.0f);
// db_N += column sums of dy_TN.
void bias_backward(Stream& s, Tensor db_N, Tensor dy_TN);

// ---- Activations ------------------------------------------------------------------------------

// y_TF = silu(gate) * up, gate = gate_up[:, :F], up = gate_up[:, F:]  (SwiGLU, arXiv 2002.05202).
void swiglu(Stream& s, Tensor y_TF, Tensor gate_up_T2F);
void swiglu_backward(Stream& s, Tensor dgate_up_T2F, Tensor dy_TF, Tensor gate_up_T2F);  // =
// y = sigmoid(x + b_H) per column; x, y [T, H].
void bias_sigmoid(Stream& s, Tensor y_TH, Tensor x_TH, Tensor b_H);
// dx_TH = dy * y * (1 - y).
void sigmoid_backward(Stream& s, Tensor dx_TH, Tensor dy_TH, Tensor y_TH);

// ---- Positions ----------------------------------------------------------------------------------

struct RopeParams {
  int heads = 0;
  float base = 10000.0f;
  bool inverse = false;         // rotate back: the gradient
  float position_scale = 1.0f;  // of every position
};
// Rotates x [T, H*d] in place by each token's position, half-split convention:
// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:d/2], x2 = x[d/2:]. Strided rows allowed.
void rope(Stream& s, Tensor x_THd, Tensor positions_T, const RopeParams& params);

// ---- Attention --------------------------------------------------------------------------------

// Stick-breaking attention (arXiv 2410.17980, equations 1-4). For token j and keys i < j (i <= j
// with attend_current) of the same document:
//   z_ij = scale q_j.k_i   beta_ij = f_i sigmoid(z_ij)   A_ij = beta_ij prod_{i<k<j} (1 - beta_kj)
//   o_j = sum_i A_ij v_i   rem_j = 1 - sum_i A_ij
// f_i is the forget gate, 1 without one. q, k, v, o are [T, H*d]; q, k, v may be column ranges of
// one qkv matrix.
enum class Remainder : uint8_t {
  kNone,
  kValue,  // o_j += rem_j v_j
  kBias,   // o_j += rem_j r_h
};
struct StickBreakingParams {
  int heads = 0;
  float scale = 1.0f;
  bool attend_current = false;
  Remainder remainder = Remainder::kNone;
  // Keys left of the point where every query of a tile has rem < skip_epsilon are dropped, in the
  // forward and, by the saved stop, in the backward pass. 0 never drops any.
  float skip_epsilon = 0.0f;
};
// Rows of a query tile that share one stop; the stop is the first key (relative to the document)
// that the tile reads.
inline constexpr int kStickBreakingTile = 64;
struct StickBreakingForward {
  Tensor o_THd;
  Tensor log2_rem_HT;  // f32, log2 of the remainder after all keys, which does not underflow
  Tensor stop_HT;      // i32: for each query its tile's first key, relative to its document
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};            // f in (0, 1], f32, optional
  Tensor remainder_bias_Hd{};  // r_h, with Remainder::kBias
};
struct StickBreakingBackward {
  Tensor dq_THd, dk_THd, dv_THd;  // =
  Tensor dgate_TH{};              // =, with a gate
  Tensor dremainder_bias_Hd{};    // +=, with Remainder::kBias
  Tensor do_THd;
  Tensor log2_rem_HT, stop_HT;  // of the forward pass
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};
  Tensor remainder_bias_Hd{};
};
void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params);
// Memory: O(T) saved, scratch O(tile * max_seqlen) per thread. Deterministic.
void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params);

// Softmax attention, causal (i <= j), document-masked: o_j = sum_i softmax_i(scale q_j.k_i) v_i.
// window > 0: only the `window` nearest keys, the token itself included.
struct SoftmaxParams {
  int heads = 0;
  float scale = 1.0f;
  int64_t window = 0;
};
struct SoftmaxForward {
  Tensor o_THd;
  Tensor lse_HT;  // f32, log of the softmax denominator
  Tensor q_THd, k_THd, v_THd;
};
struct SoftmaxBackward {
  Tensor dq_THd, dk_THd, dv_THd;  // =
  Tensor do_THd, o_THd, lse_HT;
  Tensor q_THd, k_THd, v_THd;
};
void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params);
void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params);

// cache_BCN[b, positions_B[b]] = x_BN[b]; x may have strided rows. A position outside the cache is
// an error.
void cache_append(Stream& s, Tensor cache_BCN, Tensor x_BN, Tensor positions_B);

// One new token for each of B independent sequences against its cached keys and values.
// k_cache, v_cache: [B, C, H*d], rows [0, lengths_B[b]) valid, the new token's own k and v last.
struct DecodeTensors {
  Tensor o_BHd;
  Tensor q_BHd;
  Tensor k_cache_BCHd, v_cache_BCHd;
  Tensor gate_cache_BCH{};  // stick-breaking with a forget gate
  Tensor remainder_bias_Hd{};
  Tensor lengths_B;  // i32, the new token included
};
void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params);
void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params);

// ---- Loss ---------------------------------------------------------------------------------------

// Chunked linear + cross-entropy: logits = logit_scale * x_TD w_VD^T exist only chunk by chunk.
//   loss_T[t] = lse_t - logit_t[target] (nats), 0 where target < 0 (ignored)
//   objective = loss_weight * sum_t (loss_T[t] + z_loss lse_t^2)
struct CrossEntropy {
  Tensor loss_T;  // f32, =, without z-loss
  Tensor
      hits_T{};    // f32, =, 1 where the target's logit is larger than all others, else 0; optional
  Tensor dx_TD{};  // =, gradient of the objective; absent: loss only
  Tensor dw_VD{};  // +=, with dx_TD
  Tensor x_TD, w_VD;
  Tensor targets_T;  // i32, -1 is ignored
  float loss_weight = 1.0f;
  float logit_scale = 1.0f;
  float z_loss = 0.0f;
};
void linear_cross_entropy(Stream& s, const CrossEntropy& t);

// ---- Optimizer ------------------------------------------------------------------------------

// Sums of x (f32, any shape) in double, in a fixed order: equal on every run. Non-finite input
// gives a non-finite result. The first form adds to y_1 (f64) on the device; the second waits.
void add_sum(Stream& s, Tensor y_1, Tensor x);
void add_squared_norm(Stream& s, Tensor y_1, Tensor x);
double sum(Stream& s, Tensor x);

// What an optimizer step knows of itself, f64 on the device: no step waits for the host to read it.
enum StepStat : uint8_t {
  kLossSum,      // nats, of the valid targets
  kSquaredNorm,  // of the gradients, before clipping
  kUpdates,      // applied so far
  kApply,        // 1: loss and norm are finite; 0: the step is skipped
  kGradScale,    // clipping
  kBias1,        // 1 - beta1^updates
  kBias2,
  kStepStats  // how many
};
// From kLossSum and kSquaredNorm: everything else, counting the update if it is to be applied.
// clip <= 0 does not clip.
void finish_step(Stream& s, Tensor stats, double clip, double beta1, double beta2);

// AdamW (arXiv 1711.05101) on one flat range of N elements, all f32, unless kApply is 0:
//   g = kGradScale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / kBias1 / (sqrt(v / kBias2) + eps) + decay * w)
struct DecayRange {
  int64_t begin = 0, end = 0;  // elements with weight decay
};
struct AdamW {
  Tensor w_N{}, m_N{}, v_N{}, grad_N{};
  Tensor compute_N{};                    // optional, the new weights in the compute type
  Tensor stats{};                        // f64 [kStepStats]
  std::span<const DecayRange> decays{};  // ascending; elsewhere there is no decay
  float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0;
};
void adamw(Stream& s, const AdamW& t);

// A copy of a small device tensor on its way to the host: the stream goes on, the host waits only
// when it asks.
class HostRead {
 public:
  HostRead(Stream& s, Tensor x);  // f64
  ~HostRead();
  HostRead(HostRead&&) noexcept;
  HostRead& operator=(HostRead&&) noexcept;
  std::span<const double> wait();

  struct Impl;  // of the backend

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace sbtrain::ops
