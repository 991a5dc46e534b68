// The biases that softmax attention can add to its logits by the distance of query and key. Their
// formulas are in ops/attention.h.
#pragma once

#include <cuda_bf16.h>

#include "kernels/limits.h"

namespace sbtrain::kernels {

struct AlibiSlopes {
  float of_head[kMaxAlibiHeads];
};

struct FireParameters {
  const __nv_bfloat16 *c, *m;    // [1]
  const __nv_bfloat16 *w1, *b1;  // [32]
  const __nv_bfloat16* w2;       // [H, 32]
  const __nv_bfloat16* b2;       // [H]
};
// f32; the kernels add to them. b2 has no gradient, since it shifts all logits of a query alike.
struct FireGradients {
  float *c, *m, *w1, *b1, *w2;
};

}  // namespace sbtrain::kernels
