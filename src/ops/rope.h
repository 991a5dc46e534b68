// Rotary positions (arXiv 2104.09864).
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

#include "kernels/rope.h"
#include "ops/limits.h"
#include "ops/op.h"

namespace sbtrain::ops {

// The base of dynamic_ntk (modeling_rope_utils.py of transformers) for texts of at most `length`
// tokens: base (f L/L_train - (f - 1))^(d/(d-2)) for L above L_train; d counts the channels of a
// head that are rotated.
struct DynamicNtk {
  double base = 0;
  double factor = 1;
  int64_t train_length = 0;  // L_train; 0: this is not used
  double base_at(int64_t length, int64_t rotated) const {
    if (length <= train_length) return base;
    const auto d = static_cast<double>(rotated);
    const double ratio = static_cast<double>(length) / static_cast<double>(train_length);
    return base * std::pow(factor * ratio - (factor - 1.0), d / (d - 2));
  }
};

struct RopeParams {
  int heads = 0;
  // The radians by which each of the pairs of a head turns from one position to the next. They are
  // computed on the host in double, so that every backend turns by the same angles.
  std::vector<double> frequencies{};
  bool inverse = false;  // rotate back: the gradient
  int64_t rotated = 0;   // channels of a head that are rotated, its first ones; 0: all
  // For rows of texts of different lengths, where an op is given `lengths_T`: row t turns by the
  // frequencies of this base at lengths_T[t] tokens, in the place of `frequencies`.
  DynamicNtk dynamic{};
};

// The frequencies of the paper, of d channels that are rotated: base^(-2i/d), i = 0, ..., d/2 - 1.
inline std::vector<double> rope_frequencies(double base, int64_t rotated) {
  std::vector<double> frequencies(static_cast<size_t>(rotated / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(rotated));
  }
  return frequencies;
}

// The channels of a head of x [T, H*d] that are rotated.
inline int64_t rotated_channels(const Tensor& x_THd, const RopeParams& params) {
  return params.rotated > 0 ? params.rotated : x_THd.cols() / params.heads;
}

// The checks of what is rotated: x [T, H*d] by the positions [T]; lengths_T is there or not.
inline void check_rotation(const Check& c, const Tensor& x_THd, const Tensor& positions_T,
                           const RopeParams& params, const Tensor& lengths_T = {}) {
  const int64_t whole = c.heads("x_THd", x_THd, x_THd.rows(), params.heads);
  const int64_t d = rotated_channels(x_THd, params);
  c.that(d % 2 == 0, "heads of odd dimension");
  c.that(params.rotated >= 0 && d <= whole, "more channels are to be rotated than a head has");
  c.that(static_cast<int64_t>(params.frequencies.size()) == d / 2,
         "there must be a frequency for each pair of a head that is rotated");
  c.flat("positions_T", positions_T, x_THd.rows(), DType::kI32);
  if (!lengths_T.defined()) return;
  c.flat("lengths_T", lengths_T, x_THd.rows(), DType::kI32);
  c.that(params.dynamic.train_length > 0 && d > 2 && !params.inverse,
         "lengths_T is for the forward pass of dynamic_ntk alone");
}

// What the kernels take of a rotation; check_limits() has bounded the number of frequencies.
inline kernels::Rope rotation_parameters(const Tensor& x_THd, const Tensor& positions_T,
                                         const RopeParams& params, const Tensor& lengths_T = {}) {
  const auto head_dim = static_cast<int>(x_THd.cols() / params.heads);
  const auto rotated = static_cast<int>(rotated_channels(x_THd, params));
  kernels::Rope p{x_THd, positions_T, x_THd.rows(), params.heads, head_dim, rotated, {}};
  for (size_t i = 0; i < params.frequencies.size(); ++i) {
    const double turns = params.frequencies[i] / (2.0 * std::numbers::pi);
    p.turns[i] = params.inverse ? -turns : turns;
  }
  if (lengths_T.defined()) {
    p.lengths = lengths_T;
    p.base = params.dynamic.base;
    p.factor = params.dynamic.factor;
    p.train_length = static_cast<double>(params.dynamic.train_length);
  }
  return p;
}

// Rotates x [T, H*d] in place by each token's position, half-split convention:
// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:r/2], x2 = x[r/2:r] of the r channels of
// each head that are rotated; the others stay as they are. Strided rows allowed.
struct Rope {
  static constexpr std::string_view kName = "rope";
  Tensor x_THd;
  Tensor positions_T;
  RopeParams params;
  Tensor lengths_T = {};  // i32, if rows differ in RopeParams::dynamic
  void check() const { check_rotation(Check(kName), x_THd, positions_T, params, lengths_T); }
  void check_limits(const Target&) const {
    check_rope_head_dim(kName, rotated_channels(x_THd, params));
  }
  kernels::Rope kernel() const {
    return rotation_parameters(x_THd, positions_T, params, lengths_T);
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Rope& op);
}  // namespace cpu

}  // namespace sbtrain::ops
