// The model's last matrix product and the cross-entropy of its result, in chunks.
#pragma once

#include <algorithm>

#include "ops/scratch.h"

namespace sbtrain::ops {

// The number of tokens whose logits exist at once. On the CPU they take about 8 MiB: they stay in
// the caches between the three matrix products that share them, yet suffice for these to run at
// full speed. On a GPU they take about 1 GiB, so that each product fills it, in chunks of equal
// size.
inline int64_t logits_chunk_tokens(const Stream& s, int64_t tokens, int64_t vocab) {
  if (!on_cuda(s)) {
    constexpr int64_t kElements = int64_t{1} << 21;
    return std::min(tokens, std::max<int64_t>(64, kElements / vocab / 64 * 64));
  }
  constexpr int64_t kElements = int64_t{1} << 28;
  const int64_t chunks = std::max<int64_t>(1, (tokens * vocab + kElements - 1) / kElements);
  return std::min(tokens, ((tokens + chunks - 1) / chunks + 127) / 128 * 128);
}

// logits = logit_scale * x_TD w_VD^T exist only chunk by chunk.
//   loss_T[t] = lse_t - logit_t[target] (nats), 0 where target < 0 (ignored)
//   objective = loss_weight * sum_t (loss_T[t] + z_loss lse_t^2)
struct CrossEntropy {
  static constexpr std::string_view kName = "linear_cross_entropy";
  Tensor loss_T;  // f32, =, without z-loss
  Tensor
      hits_T{};    // f32, =, 1 where the target's logit is larger than all others, else 0; optional
  Tensor dx_TD{};  // =, gradient of the objective; absent: loss only
  Tensor dw_VD{};  // += with accumulate_dw, = without; with dx_TD
  Tensor x_TD, w_VD;
  Tensor targets_T;  // i32, -1 is ignored
  float loss_weight = 1.0f;
  float logit_scale = 1.0f;
  float z_loss = 0.0f;
  bool accumulate_dw = true;

  struct Scratch {
    Buffer logits;   // f32
    Buffer dlogits;  // bf16, on the GPU when there is a backward pass; the CPU works in place
    Buffer workspace;
    Buffer second;  // for two products at the same time (LinearBackward)
  };

  void check() const {
    const Check c(kName);
    c.matrix("x_TD", x_TD, x_TD.rows(), w_VD.cols());
    c.matrix("w_VD", w_VD, w_VD.rows(), x_TD.cols(), x_TD.dtype);
    c.flat("loss_T", loss_T, x_TD.rows(), DType::kF32);
    if (hits_T.defined()) c.flat("hits_T", hits_T, x_TD.rows(), DType::kF32);
    c.flat("targets_T", targets_T, x_TD.rows(), DType::kI32);
    c.that(dx_TD.defined() == dw_VD.defined(), "dx_TD and dw_VD come together");
    if (!dx_TD.defined()) return;
    c.same("dx_TD", dx_TD, x_TD);
    c.matrix("dw_VD", dw_VD, w_VD.rows(), w_VD.cols(), DType::kF32);
  }
  Scratch scratch(const Stream& s) const {
    const int64_t rows = logits_chunk_tokens(s, x_TD.rows(), w_VD.rows());
    const auto chunk = [&](const char* name, DType dtype) {
      return s.memory().allocate(MemoryClass::kLogits, name, dtype, {rows, w_VD.rows()});
    };
    Scratch scratch;
    scratch.logits = chunk("logits", DType::kF32);
    if (dx_TD.defined() && on_cuda(s)) scratch.dlogits = chunk("dlogits", DType::kBF16);
    scratch.workspace = linear_workspace(s);
    constexpr int64_t kSmall = int64_t{1} << 30;  // multiplications and additions
    const bool small = rows * w_VD.rows() * w_VD.cols() < kSmall;
    if (dx_TD.defined() && small) scratch.second = linear_workspace(s);
    return scratch;
  }
};

namespace cpu {
void run(Cpu, Stream& s, const CrossEntropy& op, const CrossEntropy::Scratch& scratch);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const CrossEntropy& op, const CrossEntropy::Scratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
