// Grouped-query attention (arXiv 2305.13245): heads of keys and values that several heads of
// queries share. Head h of H reads head h / (H / G) of the G heads of keys and values. Attention
// over packs takes one head of keys and values for each head of queries, which these ops make;
// decoding reads the shared heads where they lie (ops/attention.h).
#pragma once

#include "kernels/heads.h"
#include "ops/op.h"

namespace sbtrain::ops {

// What the two ops share: `many` is [T, H*d], `few` is [T, G*d], and G divides H.
inline void check_groups(const Check& c, const Tensor& many, const Tensor& few, int head_dim) {
  c.matrix("the heads of queries", many);
  c.matrix("the heads of keys", few, many.rows(), few.cols());
  c.that(
      head_dim > 0 && few.cols() > 0 && few.cols() % head_dim == 0 && many.cols() % few.cols() == 0,
      "the heads do not form groups");
}

inline int heads(const Tensor& x, int head_dim) {
  return static_cast<int>(x.cols() / head_dim);
}

// y_h = x_{h / (H / G)}. Strided rows allowed.
struct RepeatHeads {
  static constexpr std::string_view kName = "repeat_heads";
  Tensor y_THd;
  Tensor x_TGd;
  int head_dim;
  void check() const { check_groups(Check(kName), y_THd, x_TGd, head_dim); }
  kernels::RepeatHeads kernel() const {
    return {y_THd, x_TGd, y_THd.rows(), heads(y_THd, head_dim), heads(x_TGd, head_dim), head_dim};
  }
};

// dx_g = the sum of dy_h over the heads h of group g, in f32 and in the order of the heads.
struct RepeatHeadsBackward {
  static constexpr std::string_view kName = "repeat_heads_backward";
  Tensor dx_TGd;
  Tensor dy_THd;
  int head_dim;
  void check() const { check_groups(Check(kName), dy_THd, dx_TGd, head_dim); }
  kernels::RepeatHeadsBackward kernel() const {
    return {dx_TGd,  dy_THd, dy_THd.rows(), heads(dy_THd, head_dim), heads(dx_TGd, head_dim),
            head_dim};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const RepeatHeads& op);
void run(Cpu, Stream& s, const RepeatHeadsBackward& op);
}  // namespace cpu

}  // namespace sbtrain::ops
