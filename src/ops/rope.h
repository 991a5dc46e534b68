// Rotary positions (arXiv 2104.09864).
#pragma once

#include "ops/limits.h"
#include "ops/op.h"

namespace sbtrain::ops {

struct RopeParams {
  int heads = 0;
  float base = 10000.0f;
  bool inverse = false;         // rotate back: the gradient
  float position_scale = 1.0f;  // of every position
};

// Rotates x [T, H*d] in place by each token's position, half-split convention:
// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:d/2], x2 = x[d/2:]. Strided rows allowed.
struct Rope {
  static constexpr std::string_view kName = "rope";
  Tensor x_THd;
  Tensor positions_T;
  RopeParams params;
  void check() const {
    const Check c(kName);
    c.that(c.heads("x_THd", x_THd, x_THd.rows(), params.heads) % 2 == 0, "heads of odd dimension");
    c.flat("positions_T", positions_T, x_THd.rows(), DType::kI32);
  }
  void check_limits(const Target&) const {
    check_rope_head_dim(kName, x_THd.cols() / params.heads);
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Rope& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const Rope& op);
}  // namespace cuda

}  // namespace sbtrain::ops
