// Cosines and sines of rotary positions, for one token after the other.
#pragma once

#include <vector>

#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "ops/rope.h"

namespace sbtrain::ops::cpu {

// Calls body(t, column, cosines, sines) for every token and head of a [T, H*d] tensor whose first
// column is `column`; there is one cosine and sine for each pair of the head that is rotated.
// lengths_T is that of Rope.
template <typename Body>
void for_each_rotated_head(const Tensor& x_THd, const Tensor& positions_T, const RopeParams& params,
                           const Tensor& lengths_T, Body&& body) {
  const int64_t cols = x_THd.cols();
  const int64_t head_dim = cols / params.heads;
  const int64_t rotated = rotated_channels(x_THd, params);
  const int64_t half = rotated / 2;
  const int32_t* lengths = lengths_T.defined() ? lengths_T.i32() : nullptr;
  const double direction = params.inverse ? -1.0 : 1.0;
  const int32_t* positions = positions_T.i32();
  parallel_rows(x_THd.rows(), 2 * cols, [&](int64_t begin, int64_t end) {
    std::vector<float> cosines(static_cast<size_t>(half));
    std::vector<float> sines(static_cast<size_t>(half));
    float* cosine = cosines.data();
    float* sine = sines.data();
    std::vector<double> of_row;
    const double* frequency = params.frequencies.data();
    for (int64_t t = begin; t < end; ++t) {
      if (lengths != nullptr) {
        of_row = rope_frequencies(params.dynamic.base_at(lengths[t], rotated), rotated);
        frequency = of_row.data();
      }
      const double position = direction * static_cast<double>(positions[t]);
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        simd::sincos(position * frequency[i], sine[i], cosine[i]);
      }
      for (int64_t c = 0; c < cols; c += head_dim) body(t, c, cosine, sine);
    }
  });
}

}  // namespace sbtrain::ops::cpu
