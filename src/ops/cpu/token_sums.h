// Sums over tokens (gradients of per-channel weights): parallel and the same on every run.
#pragma once

#include <algorithm>

#include "ops/cpu/parallel.h"
#include "ops/scratch.h"

namespace sbtrain::ops::cpu {

// `scratch` is token_partials(). Calls body(sums, begin, end) for each of its ranges of tokens;
// `sums` are `cols` zeros, to which body adds what its tokens contribute. Then calls finish(totals,
// first, last) for ranges of columns with the sums over all tokens, parts added in order.
template <typename Body, typename Finish>
void sum_over_tokens(const Buffer& scratch, int64_t tokens, int64_t cols, Body&& body,
                     Finish&& finish) {
  const int64_t parts = scratch.tensor().rows();
  float* partials = scratch.tensor().f32();
  parallel_rows(parts, std::max<int64_t>(1, tokens / parts) * cols,
                [&](int64_t first, int64_t last) {
                  for (int64_t part = first; part < last; ++part) {
                    float* sums = partials + part * cols;
                    std::fill(sums, sums + cols, 0.0f);
                    body(sums, tokens * part / parts, tokens * (part + 1) / parts);
                  }
                });
  parallel_rows(cols, parts, [&](int64_t first, int64_t last) {
    for (int64_t part = 1; part < parts; ++part) {
      const float* sums = partials + part * cols;
#pragma omp simd
      for (int64_t i = first; i < last; ++i) partials[i] += sums[i];
    }
    finish(partials, first, last);
  });
}

}  // namespace sbtrain::ops::cpu
