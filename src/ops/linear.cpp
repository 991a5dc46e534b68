#include "ops/linear.h"

#include "kernels/scratch_sizes.h"

namespace sbtrain::ops {

DecodeLinear::Scratch DecodeLinear::scratch(const Stream& s) const {
  const auto buffer = [&](std::string_view name, int64_t cols) {
    return s.scratch(name, s.memory().compute_dtype(), {y_BN.rows(), cols});
  };
  Scratch scratch;
  if (norm_K.defined()) scratch.normed_BK = buffer("normed", x_BK.cols());
  if (on_cuda(s) && y_BN.rows() <= kernels::kSkinnyRows) return scratch;
  scratch.workspace = linear_workspace(s);
  if (swiglu) scratch.gate_up_B2N = buffer("gate_up", products());
  return scratch;
}

}  // namespace sbtrain::ops
