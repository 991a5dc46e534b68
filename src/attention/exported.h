// What the models of other programs compute of attention. A module says with these structs what its
// options become there (attention/registry.h), and export/ asks no module for its name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/rotary_options.h"

namespace sbtrain {

// The attention of the architectures of transformers that are Llama and its relatives: softmax over
// the earlier keys and the token's own.
struct TransformersAttention {
  std::optional<RotaryOptions> rotary{};  // nothing: no positions
  int64_t window = 0;                     // keys that a token sees; 0: all
  double logit_scale = 0.0;               // 0: 1/sqrt(head_dim)
  bool qkv_bias = false;
  bool qk_norm = false;        // before the rotation
  bool joint_qk_norm = false;  // of all heads together
  bool operator==(const TransformersAttention&) const = default;
};

// The attention of flash-linear-attention's stick-breaking model.
struct FlaAttention {
  double logit_scale = 0.0;  // 0: 1/sqrt(head_dim)
  bool qkv_bias = false;
  bool qk_norm = false;
  bool attend_current = false;
  std::vector<std::string> lacks{};  // why that model is another one: "it has no forget_gate"
};

}  // namespace sbtrain
