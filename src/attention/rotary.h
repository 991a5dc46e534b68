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

enum class RotaryScaling : uint8_t { kNone, kLinear, kNtk, kDynamicNtk };
template <>
inline constexpr auto kNames<RotaryScaling> =
    enum_names<RotaryScaling>({{RotaryScaling::kNone, "none"},
                               {RotaryScaling::kLinear, "linear"},
                               {RotaryScaling::kNtk, "ntk"},
                               {RotaryScaling::kDynamicNtk, "dynamic_ntk"}});

struct RotaryOptions {
  double base = 10000.0;
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 1.0;
  int64_t train_length = 0;  // dynamic_ntk: longer sequences are scaled
  bool operator==(const RotaryOptions&) const = default;
};

// Keys rope_base, rope_scaling, ...; they apply while the module's `position` is rope.
void describe(Fields& f, RotaryOptions& o);
std::vector<OptionProblem> check(const RotaryOptions& options, const ModelConfig& model);

// Rotates every token of x [T, H*d] as ops::Rope does, with its row as its position.
void rotate(HostMatrix& x_THd, const ops::RopeParams& params);

class Rotary {
 public:
  // `options` have passed check().
  Rotary(const RotaryOptions& options, const ModelConfig& model);

  // For [T, heads * head_dim] of documents of at most `length` tokens: the length of the sequences
  // in training and evaluation, and the capacity of the cache in generation. Only dynamic_ntk
  // depends on it.
  ops::RopeParams params(int64_t heads, int64_t length, bool inverse = false) const;

 private:
  RotaryOptions options_;
  double exponent_;  // d / (d - 2)
};

}  // namespace sbtrain
