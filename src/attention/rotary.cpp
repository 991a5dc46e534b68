#include "attention/rotary.h"

#include <cmath>

#include "core/error.h"

namespace sbtrain {

Rotary::Scaling Rotary::parse(const std::string& name) {
  if (name == "none") return Scaling::kNone;
  if (name == "linear") return Scaling::kLinear;
  if (name == "ntk") return Scaling::kNtk;
  if (name == "dynamic_ntk") return Scaling::kDynamicNtk;
  fail(ExitCode::kConfig,
       "model.attention.rope_scaling: '{}' is not one of none, linear, ntk, dynamic_ntk", name);
}

Rotary::Rotary(const AttentionConfig& config, const ModelConfig& model)
    : scaling_(parse(config.rope_scaling)),
      base_(config.rope_base),
      factor_(config.rope_factor),
      train_length_(config.rope_train_length) {
  const int64_t d = model.head_dim();
  if (d % 2 != 0) {
    fail(ExitCode::kConfig, "model.attention.position: rope needs an even head dimension, not {}",
         d);
  }
  const bool ntk = scaling_ == Scaling::kNtk || scaling_ == Scaling::kDynamicNtk;
  if (ntk && d < 4) {
    fail(ExitCode::kConfig, "model.attention.rope_scaling: {} needs a head dimension of 4, not {}",
         config.rope_scaling, d);
  }
  if (scaling_ == Scaling::kDynamicNtk && train_length_ < 1) {
    fail(ExitCode::kConfig,
         "model.attention.rope_train_length: dynamic_ntk needs the length that the model was "
         "trained with");
  }
  exponent_ = ntk ? static_cast<double>(d) / static_cast<double>(d - 2) : 1.0;
}

ops::RopeParams Rotary::params(int64_t heads, int64_t length, bool inverse) const {
  double base = base_;
  double position_scale = 1.0;
  if (scaling_ == Scaling::kLinear) position_scale = 1.0 / factor_;
  if (scaling_ == Scaling::kNtk) base *= std::pow(factor_, exponent_);
  if (scaling_ == Scaling::kDynamicNtk && length > train_length_) {
    const double ratio = static_cast<double>(length) / static_cast<double>(train_length_);
    base *= std::pow(factor_ * ratio - (factor_ - 1.0), exponent_);
  }
  return {.heads = static_cast<int>(heads),
          .base = static_cast<float>(base),
          .inverse = inverse,
          .position_scale = static_cast<float>(position_scale)};
}

}  // namespace sbtrain
