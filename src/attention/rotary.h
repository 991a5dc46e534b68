// Rotary positions (arXiv 2104.09864) as modules use them, with the methods that stretch them
// beyond the trained length.
#pragma once

#include <vector>

#include "attention/registry.h"
#include "ops/rope.h"

namespace sbtrain {

// How an attention module that has or could have rotary positions knows the order of its tokens.
enum class PositionEncoding : uint8_t { kRope, kAlibi, kFire, kNone };
template <>
inline constexpr auto kNames<PositionEncoding> =
    enum_names<PositionEncoding>({{PositionEncoding::kRope, "rope"},
                                  {PositionEncoding::kAlibi, "alibi"},
                                  {PositionEncoding::kFire, "fire"},
                                  {PositionEncoding::kNone, "none"}});

enum class RotaryScaling : uint8_t { kNone, kLinear, kNtk, kDynamicNtk, kYarn, kLlama3 };
template <>
inline constexpr auto kNames<RotaryScaling> =
    enum_names<RotaryScaling>({{RotaryScaling::kNone, "none"},
                               {RotaryScaling::kLinear, "linear"},
                               {RotaryScaling::kNtk, "ntk"},
                               {RotaryScaling::kDynamicNtk, "dynamic_ntk"},
                               {RotaryScaling::kYarn, "yarn"},
                               {RotaryScaling::kLlama3, "llama3"}});

struct RotaryOptions {
  double base = 10000.0;
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 1.0;
  int64_t train_length = 0;  // before the scaling: original_max_position_embeddings
  // yarn: pairs that turn more often than beta_fast over train_length stay as they are, those that
  // turn less often than beta_slow are divided by factor.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double attention_factor = 0.0;  // yarn: of queries and keys; 0: 0.1 ln(factor) + 1
  // llama3: the same with wavelengths below train_length / high_freq_factor and above train_length
  // / low_freq_factor.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  bool operator==(const RotaryOptions&) const = default;
};

// Keys rope_base, rope_scaling, ...; they apply while the module's `position` is rope.
void describe(Fields& f, RotaryOptions& o);
std::vector<OptionProblem> check(const RotaryOptions& options, const ModelConfig& model);

// The frequencies for a head of `head_dim` channels in documents of at most `length` tokens, as
// transformers computes them (ROPE_INIT_FUNCTIONS of modeling_rope_utils.py). Sources: linear,
// arXiv 2306.15595; yarn, arXiv 2309.00071; llama3, arXiv 2407.21783.
std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t head_dim,
                                       int64_t length);

// Rotates every token of x [T, H*d] as ops::Rope does, with its row as its position.
void rotate(HostMatrix& x_THd, const ops::RopeParams& params);

class Rotary {
 public:
  // `options` have passed check().
  Rotary(const RotaryOptions& options, const ModelConfig& model);

  // For [T, heads * head_dim] of documents of at most `length` tokens, Sequences::rope_length().
  // Only dynamic_ntk depends on it.
  ops::RopeParams params(int64_t heads, int64_t length, bool inverse = false) const;

  // The lengths by which the rows of a decode step turn: step.reach_B for dynamic_ntk, else none.
  Tensor lengths(const DecodeStep& step) const {
    return options_.scaling == RotaryScaling::kDynamicNtk ? step.reach_B : Tensor();
  }

  // The factor of the logits that comes with the scaling: the square of yarn's attention_factor,
  // which multiplies queries and keys alike; else 1.
  double logit_factor() const;

 private:
  RotaryOptions options_;
  int64_t head_dim_;
  std::vector<double> frequencies_;  // of all kinds but dynamic_ntk
};

}  // namespace sbtrain
