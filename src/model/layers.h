// What blocks are made of besides attention: the normalisation before a sublayer and the MLP, each
// of the kind that the configuration selects.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/linear.h"
#include "config/config.h"
#include "core/stream.h"
#include "core/weights.h"

namespace sbtrain {

// A matrix of activations in the compute type.
Buffer activation(Stream& s, std::string_view name, int64_t rows, int64_t cols);

// RMSNorm (<name>.weight) or LayerNorm (<name>.weight and .bias).
class Norm {
 public:
  Norm(const ModelConfig& config, std::string name);
  void add_parameters(std::vector<TensorSpec>& specs) const;
  void forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w) const;
  // dx_TD += gradient.
  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                const Weights& w) const;
  // As part of the product that follows it, which only RMSNorm can be.
  bool fuses() const { return !centered_; }
  InputNorm fused(const Weights& w) const { return {.w_D = w.at(weight_), .eps = eps_}; }

 private:
  bool centered_;  // LayerNorm
  float eps_;
  int64_t width_;
  std::string weight_, bias_;
};

struct MlpSaved {
  Buffer outer_TN;  // SwiGLU: gate and up; GELU: before the bias
  Buffer inner_TF;
};

// SwiGLU, GELU with biases, or none: the identity.
class Mlp {
 public:
  explicit Mlp(const ModelConfig& config);
  void add_parameters(std::vector<TensorSpec>& specs) const;

  // y_TD = h_TD + r * mlp(x_TD); with an undefined y_TD only `saved` is filled.
  void forward(Stream& s, Tensor y_TD, Tensor x_TD, Tensor h_TD, const Weights& w,
               MlpSaved& saved) const;
  // The same of norm(h_TD) for a decode step. Only SwiGLU has it, with a norm that fuses.
  void decode(Stream& s, Tensor y_BD, Tensor h_BD, const Weights& w, const InputNorm& norm) const;
  bool gated() const { return kind_ == MlpKind::kSwiGlu; }
  // dx_TD = the gradient of x, from dy_TD, the gradient of y.
  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                const Weights& w, const MlpSaved& saved) const;
  // Computes inner_TF again, which a selective policy released.
  void recompute(Stream& s, const Weights& w, MlpSaved& saved) const;

  int64_t stored_inner() const { return inner_; }

 private:
  LinearSpec outer_spec(const ModelConfig& config) const;
  LinearSpec down_spec(const ModelConfig& config) const;
  void activate(Stream& s, const Weights& w, const MlpSaved& saved) const;

  MlpKind kind_;
  int64_t inner_;  // padded to a fast multiple
  Linear outer_;   // SwiGLU: gate and up; GELU: up, whose bias the activation adds
  Linear down_;
};

// The initialisation of projections into the residual stream: smaller, so that the stream's
// variance does not grow with depth (GPT-2).
Init into_residual(const ModelConfig& config);
// The standard deviation of the other matrices of a block that are not the attention's. It is
// model.init_std rounded to f32, since the initial weights of a seed depend on its every bit.
double block_init_std(const ModelConfig& config);

}  // namespace sbtrain
