#include "ops/embedding.h"

#include "core/error.h"
#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {
namespace {

void check_tokens(std::string_view op, const Tensor& tokens_T, int64_t vocab) {
  const int32_t* tokens = tokens_T.i32();
  for (int64_t t = 0; t < tokens_T.numel(); ++t) {
    require(tokens[t] >= 0 && tokens[t] < vocab, "{}: token {} at {} is outside [0, {})", op,
            tokens[t], t, vocab);
  }
}

}  // namespace

void run(Cpu, Stream& /*s*/, const Embedding& op) {
  check_tokens("embedding", op.tokens_T, op.w_VD.rows());
  const int64_t width = op.y_TD.cols();
  const int32_t* tokens = op.tokens_T.i32();
  const float scale = op.scale;
  float* y_data = op.y_TD.f32();
  const float* w_data = op.w_VD.f32();
  parallel_rows(op.y_TD.rows(), width, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = y_data + t * op.y_TD.row_stride;
      const float* w = w_data + tokens[t] * op.w_VD.row_stride;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) y[i] = scale * w[i];
    }
  });
}

// A thread owns a range of columns and walks all tokens in order: a token that occurs twice is
// summed in the same order every time.
void run(Cpu, Stream& /*s*/, const EmbeddingBackward& op, const Buffer& /*scratch*/) {
  check_tokens("embedding_backward", op.tokens_T, op.dw_VD.rows());
  constexpr int64_t kLine = 16;  // floats of one cache line
  const int64_t width = op.dy_TD.cols();
  const int64_t tokens_count = op.dy_TD.rows();
  const int32_t* tokens = op.tokens_T.i32();
  const float scale = op.scale;
  float* dw_data = op.dw_VD.f32();
  const float* dy_data = op.dy_TD.f32();
  const int64_t lines = (width + kLine - 1) / kLine;
  parallel_rows(lines, kLine * tokens_count, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLine;
    const int64_t last = std::min(width, end * kLine);
    for (int64_t t = 0; t < tokens_count; ++t) {
      float* dw = dw_data + tokens[t] * op.dw_VD.row_stride;
      const float* dy = dy_data + t * op.dy_TD.row_stride;
#pragma omp simd
      for (int64_t i = first; i < last; ++i) dw[i] += scale * dy[i];
    }
  });
}

}  // namespace sbtrain::ops::cpu
