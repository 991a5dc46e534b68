// Rotary positions (arXiv 2104.09864) as modules use them, with what stretches them beyond the
// trained length.
#pragma once

#include "attention/attention.h"
#include "ops/ops.h"

namespace sbtrain {

class Rotary {
 public:
  // Throws ExitCode::kConfig for settings that do not fit.
  Rotary(const AttentionConfig& config, const ModelConfig& model);

  // For [T, heads * head_dim] of documents of at most `length` tokens: the length of the sequences
  // in training and evaluation, and the capacity of the cache in generation. dynamic_ntk alone
  // depends on it.
  ops::RopeParams params(int64_t heads, int64_t length, bool inverse = false) const;

 private:
  enum class Scaling : uint8_t { kNone, kLinear, kNtk, kDynamicNtk };
  static Scaling parse(const std::string& name);

  Scaling scaling_;
  double base_, factor_, exponent_;  // d / (d - 2)
  int64_t train_length_;
};

}  // namespace sbtrain
