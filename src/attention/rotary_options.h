// The options of rotary positions (attention/rotary.h).
#pragma once

#include <cstdint>

#include "core/enum_names.h"

namespace sbtrain {

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
  double fraction = 1.0;  // of the channels of a head that are rotated
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
  // The channels of a head of `head_dim` that are rotated, its first ones.
  int64_t rotated(int64_t head_dim) const {
    return static_cast<int64_t>(static_cast<double>(head_dim) * fraction);
  }
  bool operator==(const RotaryOptions&) const = default;
};

}  // namespace sbtrain
