// AdamW: decoupled weight decay (arXiv 1711.05101), by ops::AdamW.
#pragma once

#include "optim/optimizer.h"

namespace sbtrain {

// Its moments in checkpoints.
inline constexpr const char* kAdamM = "adam_m";
inline constexpr const char* kAdamV = "adam_v";

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  bool operator==(const AdamWOptions&) const = default;
};
void describe(Fields& f, AdamWOptions& o);

class AdamW : public Optimizer {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}

  std::vector<std::string> states(const TensorSpec& spec) const override;
  Means means() const override { return {.first = options_.beta1, .second = options_.beta2}; }
  void update(Stream& s, const UpdateInputs& in, std::span<const FlatView> views) const override;

 private:
  AdamWOptions options_;
};

}  // namespace sbtrain
