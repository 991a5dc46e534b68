// Rotary positions (arXiv 2104.09864) as modules use them, with the methods that stretch them
// beyond the trained length.
#pragma once

#include <vector>

#include "attention/registry.h"
#include "attention/rotary_options.h"
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

// Keys rope_base, rope_scaling, ...; they apply while the module's `position` is rope.
void describe(Fields& f, RotaryOptions& o);
// Key rope_fraction, which modules that can only rotate whole heads refuse.
void describe_rope_fraction(Fields& f, RotaryOptions& o);
std::vector<OptionProblem> check(const RotaryOptions& options, const AttentionShape& model);

// The frequencies for `rotated` channels of a head in documents of at most `length` tokens, as
// transformers computes them (ROPE_INIT_FUNCTIONS of modeling_rope_utils.py). Sources: linear,
// arXiv 2306.15595; yarn, arXiv 2309.00071; llama3, arXiv 2407.21783.
std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t rotated,
                                       int64_t length);

// Rotates every token of x [T, H*d] as ops::Rope does, with its row as its position.
void rotate(HostMatrix& x_THd, const ops::RopeParams& params);

class Rotary {
 public:
  // `options` have passed check().
  Rotary(const RotaryOptions& options, const AttentionShape& model);

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
  int64_t head_dim_, rotated_;
  std::vector<double> frequencies_;  // of all kinds but dynamic_ntk
};

}  // namespace sbtrain
