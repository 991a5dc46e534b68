// The MLP of a block, of the kind that the configuration selects.
#pragma once

#include <cstdint>
#include <vector>

#include "core/enum_names.h"
#include "core/stream.h"
#include "core/weights.h"
#include "layers/linear.h"
#include "layers/norm.h"

namespace sbtrain {

enum class MlpKind : uint8_t { kSwiGlu, kGelu, kGeluTanh, kNone };
template <>
inline constexpr auto kNames<MlpKind> = enum_names<MlpKind>({{MlpKind::kSwiGlu, "swiglu"},
                                                             {MlpKind::kGelu, "gelu"},
                                                             {MlpKind::kGeluTanh, "gelu_tanh"},
                                                             {MlpKind::kNone, "none"}});

struct MlpSpec {
  MlpKind kind = MlpKind::kSwiGlu;
  int64_t width = 0;                 // D
  int64_t inner = 0;                 // F
  float residual_multiplier = 1.0f;  // r; only SwiGLU takes another than 1
  Init init;                         // of the matrices from D to F
  Init down_init;                    // of the matrix from F to D
};

struct MlpSaved {
  Buffer outer_TN;  // SwiGLU: gate and up; GELU: before the bias
  Buffer inner_TF;
  // Where products are in fp8: the largest |inner|, and what stands for x_TD and inner_TF where
  // they are not kept for the backward pass.
  Buffer inner_amax_1;
  Fp8Inputs x, inner;
};

// What an MLP takes. With products in fp8, amax_1 (f32), the largest |x|, spares a pass; and
// forward() may leave in `saved` what stands for x_TD, or for inner_TF, which it then releases.
struct MlpInput {
  Tensor x_TD;
  Tensor amax_1{};
  bool keeps_x_in_fp8 = false;
  bool keeps_inner_in_fp8 = false;
};

// SwiGLU, GELU with biases (exact or in its tanh form), or none: the identity.
class Mlp {
 public:
  explicit Mlp(const MlpSpec& spec);
  void add_parameters(std::vector<TensorSpec>& specs) const;

  // y_TD = h_TD + r * mlp(x_TD), or r * mlp(x_TD) with an undefined h_TD; with an undefined y_TD
  // only `saved` is filled.
  void forward(Stream& s, Tensor y_TD, const MlpInput& x, Tensor h_TD, const Weights& w,
               MlpSaved& saved) const;
  // The same of norm(x_BD) for a decode step. Only SwiGLU has it, with a norm that fuses or none.
  void decode(Stream& s, Tensor y_BD, Tensor x_BD, Tensor h_BD, const Weights& w,
              const InputNorm& norm) const;
  bool gated() const { return kind_ == MlpKind::kSwiGlu; }
  // dx_TD = the gradient of x, from dy_TD, the gradient of y. x_TD may be undefined where `saved`
  // has what stands for it. dy_amax_1 (f32), the largest |dy|, spares a pass. Consumes `saved`.
  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, const MlpInput& x,
                const Weights& w, MlpSaved& saved, Tensor dy_amax_1 = {}) const;
  // Whether the products with x of as many tokens are in fp8.
  bool reads_fp8(const Stream& s, int64_t tokens) const {
    return kind_ != MlpKind::kNone && outer_.in_fp8(s, tokens);
  }
  // Computes inner_TF again, which a selective policy released; and leaves in `saved` what
  // forward() does with the same x.
  void recompute(Stream& s, const MlpInput& x, const Weights& w, MlpSaved& saved) const;

  int64_t stored_inner() const { return inner_; }

 private:
  LinearSpec outer_spec(const MlpSpec& spec) const;
  LinearSpec down_spec(const MlpSpec& spec) const;
  void activate(Stream& s, const Weights& w, MlpSaved& saved) const;
  void keep_inner(Stream& s, MlpSaved& saved) const;

  MlpKind kind_;
  int64_t inner_;  // padded to a fast multiple
  Linear outer_;   // SwiGLU: gate and up; GELU: up, whose bias the activation adds
  Linear down_;
};

}  // namespace sbtrain
