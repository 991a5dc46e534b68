// A factor for each channel, and its gradient.
#pragma once

#include "kernels/scale.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// y_TD[t] = x_TD[t] * w_D. y may be x.
struct Scale {
  static constexpr std::string_view kName = "scale";
  Tensor y_TD;
  Tensor x_TD, w_D;
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("y_TD", y_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
  }
  kernels::Scale kernel() const { return {y_TD, x_TD, w_D, x_TD.rows(), x_TD.cols()}; }
};

// dx = dy * w; dw += sum_t dy x. dx may be dy.
struct ScaleBackward {
  static constexpr std::string_view kName = "scale_backward";
  Tensor dx_TD, dw_D;
  Tensor dy_TD, x_TD, w_D;
  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD);
    c.same("dx_TD", dx_TD, x_TD);
    c.same("dy_TD", dy_TD, x_TD);
    c.flat("w_D", w_D, x_TD.cols(), x_TD.dtype);
    c.flat("dw_D", dw_D, x_TD.cols(), DType::kF32);
  }
  Buffer scratch(const Stream& s) const { return token_partials(s, x_TD.cols()); }
  kernels::ScaleBackward kernel() const {
    return {dx_TD, dw_D, dy_TD, x_TD, w_D, x_TD.rows(), x_TD.cols()};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Scale& op);
void run(Cpu, Stream& s, const ScaleBackward& op, const Buffer& scratch);
}  // namespace cpu

}  // namespace sbtrain::ops
