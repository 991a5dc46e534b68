// Cosines and sines of rotary positions, for one token after the other.
#pragma once

#include <cmath>
#include <vector>

#include "ops/cpu/parallel.h"
#include "ops/cpu/simd.h"
#include "ops/rope.h"

namespace sbtrain::ops::cpu {

// theta_i = position_scale base^(-2i/d), negative for the inverse rotation.
inline std::vector<double> rotation_frequencies(const RopeParams& params, int64_t head_dim) {
  std::vector<double> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(head_dim);
    const double frequency = static_cast<double>(params.position_scale) *
                             std::pow(static_cast<double>(params.base), -exponent);
    frequencies[i] = params.inverse ? -frequency : frequency;
  }
  return frequencies;
}

// Calls body(t, column, cosines, sines) for every token and head of a [T, H*d] tensor whose first
// column is `column`; there is one cosine and sine for each pair of the head's halves.
template <typename Body>
void for_each_rotated_head(const Tensor& x_THd, const Tensor& positions_T, const RopeParams& params,
                           Body&& body) {
  const int64_t cols = x_THd.cols();
  const int64_t head_dim = cols / params.heads;
  const int64_t half = head_dim / 2;
  const std::vector<double> frequencies = rotation_frequencies(params, head_dim);
  const double* frequency = frequencies.data();
  const int32_t* positions = positions_T.i32();
  parallel_rows(x_THd.rows(), 2 * cols, [&](int64_t begin, int64_t end) {
    std::vector<float> cosines(static_cast<size_t>(half));
    std::vector<float> sines(static_cast<size_t>(half));
    float* cosine = cosines.data();
    float* sine = sines.data();
    for (int64_t t = begin; t < end; ++t) {
      const auto position = static_cast<double>(positions[t]);
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        simd::sincos(position * frequency[i], sine[i], cosine[i]);
      }
      for (int64_t c = 0; c < cols; c += head_dim) body(t, c, cosine, sine);
    }
  });
}

}  // namespace sbtrain::ops::cpu
