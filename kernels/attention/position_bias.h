// The biases that softmax attention can add to its logits by the distance of query and key. Their
// formulas are in ops/attention.h.
#pragma once

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

struct AlibiSlopes {
  float of_head[kMaxAlibiHeads];
};

inline constexpr float kFireLength = 512.0f;  // L0, unless a model has another

struct FireParameters {
  const bf16 *c, *m;    // [1]
  const bf16 *w1, *b1;  // [32]
  const bf16* w2;       // [H, 32]
  const bf16* b2;       // [H]
  float length = kFireLength;
};
// f32; the kernels add to them. b2 has no gradient, since it shifts all logits of a query alike.
struct FireGradients {
  float *c, *m, *w1, *b1, *w2;
};

}  // namespace sbtrain::kernels
