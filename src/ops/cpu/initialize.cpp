#include "ops/initialize.h"

#include <algorithm>

#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {
namespace {

// x [0, count) = the values of logical elements from `first` on.
void fill_values(const Initialize& op, int64_t first, float* x, int64_t count) {
  if (op.init.kind == Init::Kind::kConstant) {
    std::fill(x, x + count, static_cast<float>(op.init.value));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const double normal = op.random.normal(static_cast<uint64_t>(first + i));
    x[i] = static_cast<float>(op.init.value * normal);
  }
}

}  // namespace

void run(Cpu, Stream& /*s*/, const Initialize& op) {
  float* x = op.x_N.f32();
  parallel_rows(op.x_N.numel(), 1, [&](int64_t begin, int64_t end) {
    std::fill(x + begin, x + end, 0.0f);
    for (int64_t at = begin; at < end;) {
      const int64_t row = (op.begin + at) / op.stored_cols;
      const int64_t col = (op.begin + at) % op.stored_cols;
      const int64_t row_end = std::min(end, at + op.stored_cols - col);
      if (row < op.rows && col < op.cols) {
        const int64_t count = std::min(row_end - at, op.cols - col);
        fill_values(op, row * op.cols + col, x + at, count);
      }
      at = row_end;
    }
  });
}

}  // namespace sbtrain::ops::cpu
