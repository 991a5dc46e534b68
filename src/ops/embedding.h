// The embedding table: lookup and its gradient.
#pragma once

#include "kernels/embedding.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// y_TD[t] = scale * w_VD[tokens_T[t]]; tokens i32 in [0, V).
struct Embedding {
  static constexpr std::string_view kName = "embedding";
  Tensor y_TD;
  Tensor tokens_T, w_VD;
  float scale = 1.0f;
  void check() const {
    const Check c(kName);
    c.matrix("y_TD", y_TD, y_TD.rows(), w_VD.cols());
    c.flat("tokens_T", tokens_T, y_TD.rows(), DType::kI32);
    c.matrix("w_VD", w_VD, w_VD.rows(), y_TD.cols(), y_TD.dtype);
  }
  kernels::Embedding kernel() const {
    return {y_TD, tokens_T, w_VD, y_TD.rows(), y_TD.cols(), w_VD.rows(), scale};
  }
};

// dw_VD[tokens_T[t]] += scale * dy_TD[t], in the order of t: deterministic.
struct EmbeddingBackward {
  static constexpr std::string_view kName = "embedding_backward";
  Tensor dw_VD;
  Tensor dy_TD, tokens_T;
  float scale = 1.0f;
  void check() const {
    const Check c(kName);
    c.matrix("dy_TD", dy_TD, dy_TD.rows(), dw_VD.cols());
    c.flat("tokens_T", tokens_T, dy_TD.rows(), DType::kI32);
    c.matrix("dw_VD", dw_VD, dw_VD.rows(), dy_TD.cols(), DType::kF32);
  }
  // The tokens sorted by id, and partial sums over the tokens of one id.
  Buffer scratch(const Stream& s) const {
    if (!on_cuda(s)) return {};
    const size_t bytes = kernels::embedding_scratch(dy_TD.rows(), dy_TD.cols()).bytes;
    return s.scratch(kName, DType::kI32, {static_cast<int64_t>(bytes / 4)});
  }
  kernels::EmbeddingBackward kernel() const {
    return {dw_VD, dy_TD, tokens_T, dy_TD.rows(), dy_TD.cols(), dw_VD.rows(), scale};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Embedding& op);
void run(Cpu, Stream& s, const EmbeddingBackward& op, const Buffer& scratch);
}  // namespace cpu

}  // namespace sbtrain::ops
