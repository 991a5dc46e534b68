// Which problems the attention kernels for Hopper take, and when they are faster than the portable
// ones, as measured on an H200 (docs/performance.md). The program (src/ops/choose.cpp) and the C
// interface (c_api/) ask here.
#pragma once

#include "kernels/limits.h"

namespace sbtrain::kernels {

constexpr bool hopper_takes_heads(int64_t head_dim) {
  return head_dim == 32 || head_dim == 64 || head_dim == 128;
}
constexpr bool hopper_takes_packs(int64_t tokens) {
  return tokens >= kHopperTokens;
}

// Softmax attention by its bias; `longest` is the length of the longest document that can come.
constexpr bool plain_is_faster_on_hopper(int64_t head_dim, int64_t longest, bool backward) {
  return head_dim != 32 || longest >= (backward ? 4096 : 2048);
}
constexpr bool alibi_is_faster_on_hopper(int64_t head_dim, int64_t longest) {
  return head_dim != 32 || longest >= 2048;
}
constexpr bool fire_is_faster_on_hopper(int64_t head_dim, int64_t longest, bool backward) {
  if (head_dim == 64) return longest >= (backward ? 2048 : 4096);
  return head_dim != 32;
}

}  // namespace sbtrain::kernels
