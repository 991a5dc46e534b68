// Drawing tokens from logits where they lie, so that the logits need not go to the host.
#pragma once

#include "kernels/sampling.h"
#include "ops/op.h"

namespace sbtrain::ops {

// y_B[b] = the index of the largest of x_BV[b, 0] to x_BV[b, vocab - 1], the smallest of equals; -1
// if that largest value is not finite or one of them is NaN.
struct Argmax {
  static constexpr std::string_view kName = "argmax";
  Tensor y_B;   // i32
  Tensor x_BV;  // f32
  int64_t vocab;
  void check() const {
    const Check c(kName);
    c.matrix("x_BV", x_BV, x_BV.rows(), x_BV.cols(), DType::kF32);
    c.flat("y_B", y_B, x_BV.rows(), DType::kI32);
    c.that(vocab > 0 && vocab <= x_BV.cols(), "there are as many logits as tokens, or more");
  }
  kernels::Argmax kernel() const { return {y_B, x_BV, x_BV.rows(), vocab}; }
};

namespace cpu {
void run(Cpu, Stream& s, const Argmax& op);
}  // namespace cpu

}  // namespace sbtrain::ops
