// Rotary positions (arXiv 2104.09864).
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

#include "kernels/rope.h"
#include "ops/limits.h"
#include "ops/op.h"

namespace sbtrain::ops {

struct RopeParams {
  int heads = 0;
  // The radians by which each of the d/2 pairs of a head turns from one position to the next. They
  // are computed on the host in double, so that every backend turns by the same angles.
  std::vector<double> frequencies{};
  bool inverse = false;  // rotate back: the gradient
};

// The frequencies of the paper: base^(-2i/d), i = 0, ..., d/2 - 1.
inline std::vector<double> rope_frequencies(double base, int64_t head_dim) {
  std::vector<double> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
  }
  return frequencies;
}

// The checks of what is rotated: x [T, H*d] by the positions [T].
inline void check_rotation(const Check& c, const Tensor& x_THd, const Tensor& positions_T,
                           const RopeParams& params) {
  const int64_t d = c.heads("x_THd", x_THd, x_THd.rows(), params.heads);
  c.that(d % 2 == 0, "heads of odd dimension");
  c.that(static_cast<int64_t>(params.frequencies.size()) == d / 2,
         "there must be a frequency for each pair of a head");
  c.flat("positions_T", positions_T, x_THd.rows(), DType::kI32);
}

// What the kernels take of a rotation; check_limits() has bounded the number of frequencies.
inline kernels::Rope rotation_parameters(const Tensor& x_THd, const Tensor& positions_T,
                                         const RopeParams& params) {
  const auto head_dim = static_cast<int>(x_THd.cols() / params.heads);
  kernels::Rope p{x_THd, positions_T, x_THd.rows(), params.heads, head_dim, {}};
  for (size_t i = 0; i < params.frequencies.size(); ++i) {
    const double turns = params.frequencies[i] / (2.0 * std::numbers::pi);
    p.turns[i] = params.inverse ? -turns : turns;
  }
  return p;
}

// Rotates x [T, H*d] in place by each token's position, half-split convention:
// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:d/2], x2 = x[d/2:]. Strided rows allowed.
struct Rope {
  static constexpr std::string_view kName = "rope";
  Tensor x_THd;
  Tensor positions_T;
  RopeParams params;
  void check() const { check_rotation(Check(kName), x_THd, positions_T, params); }
  void check_limits(const Target&) const {
    check_rope_head_dim(kName, x_THd.cols() / params.heads);
  }
  kernels::Rope kernel() const { return rotation_parameters(x_THd, positions_T, params); }
};

namespace cpu {
void run(Cpu, Stream& s, const Rope& op);
}  // namespace cpu

}  // namespace sbtrain::ops
