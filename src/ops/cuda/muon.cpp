#include "ops/muon.h"

#include <algorithm>
#include <utility>

#include "ops/cuda/context.h"
#include "ops/run.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Orthogonalize& op, const Orthogonalize::Scratch& scratch) {
  const bool wide = op.x_NK.rows() <= op.x_NK.cols();  // A = X X^T is the smaller one
  Tensor x = scratch.x_NK;
  Tensor next = op.x_NK;
  const Tensor& a = scratch.a;
  const Tensor& b = scratch.b;
  const int64_t count = x.numel();
  run(Cuda(), s,
      Normalize{.y_N = x.reshaped({count}),
                .x_N = op.x_NK.reshaped({count}),
                .margin = Orthogonalize::kMargin},
      scratch.partials);
  for (const auto& [c1, c3, c5] : Orthogonalize::kCoefficients) {
    gemm(s, {.y = a, .a = x, .b = x, .transpose_a = !wide, .transpose_b = wide}, scratch.workspace);
    gemm(s, {.y = b, .a = a, .b = a, .alpha = c5, .beta = c3, .c = a}, scratch.workspace);
    gemm(s, {.y = next, .a = wide ? b : x, .b = wide ? x : b, .beta = c1, .c = x},
         scratch.workspace);
    std::swap(x, next);
  }
  static_assert(Orthogonalize::kSteps % 2 == 1, "the last step writes where x was given");
}

}  // namespace sbtrain::ops::cuda
