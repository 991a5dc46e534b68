// The normalisation of a sublayer's input or output, of the kind that the configuration selects.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/enum_names.h"
#include "core/stream.h"
#include "core/weights.h"

namespace sbtrain {

enum class NormKind : uint8_t { kRmsNorm, kLayerNorm };
template <>
inline constexpr auto kNames<NormKind> =
    enum_names<NormKind>({{NormKind::kRmsNorm, "rmsnorm"}, {NormKind::kLayerNorm, "layernorm"}});

// An RMSNorm that an input has still to pass; with an undefined w_D, none.
struct InputNorm {
  Tensor w_D;
  float eps = 0.0f;
};

struct NormSpec {
  NormKind kind = NormKind::kRmsNorm;
  std::string name;   // of the parameters: <name>.weight and, of LayerNorm, <name>.bias
  int64_t width = 0;  // D
  float eps = 0.0f;
};

class Norm {
 public:
  explicit Norm(NormSpec spec);
  void add_parameters(std::vector<TensorSpec>& specs) const;
  // amax_1 (f32), if it is given, = the largest |y|.
  void forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, Tensor amax_1 = {}) const;
  // dx_TD += gradient; amax_1 (f32), if it is given, = the largest |dx|.
  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                const Weights& w, Tensor amax_1 = {}) const;
  // As part of the product that follows it, which only RMSNorm can be.
  bool fuses() const { return !centered_; }
  InputNorm fused(const Weights& w) const { return {.w_D = w.at(weight_), .eps = eps_}; }

 private:
  bool centered_;  // LayerNorm
  float eps_;
  int64_t width_;
  std::string weight_, bias_;
};

}  // namespace sbtrain
