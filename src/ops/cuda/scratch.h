// Scratch that only ops of the CUDA backend take. Needs no CUDA header: every build plans with it.
#pragma once

#include <algorithm>

#include "core/stream.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/softmax_bias.h"

namespace sbtrain::ops::cuda {

// Stick-breaking backward: for each row and each block of 64 keys of its document the state
// {log2 T, C} in which the block begins (see kernels/attention/stickbreaking.h). It is the one
// thing that grows with T * L, so heads go through it in groups that fit a fixed budget.
struct StickBreakingWorkspace {
  int64_t blocks = 0;  // key blocks that a row can see
  int64_t heads = 0;   // in one group
};
inline StickBreakingWorkspace stickbreaking_workspace(int64_t tokens, int64_t heads,
                                                      int64_t max_seqlen) {
  constexpr int64_t kBudget = int64_t{512} << 20;  // bytes
  StickBreakingWorkspace w;
  w.blocks = (max_seqlen + 126) / 64 + 2;
  const int64_t fit = std::max<int64_t>(1, kBudget / std::max<int64_t>(1, tokens * w.blocks * 8));
  const int64_t groups = (heads + fit - 1) / fit;
  w.heads = (heads + groups - 1) / groups;
  return w;
}
inline Buffer stickbreaking_backward_scratch(const Stream& s, int64_t tokens, int64_t heads,
                                             int64_t max_seqlen) {
  const StickBreakingWorkspace w = stickbreaking_workspace(tokens, heads, max_seqlen);
  return s.scratch("stick-breaking states", DType::kF32, {w.heads, w.blocks, tokens, 2});
}

// Softmax: whichever of cuDNN and the portable kernels takes more.
inline constexpr bool kDeterministicSoftmax = true;
inline Buffer softmax_forward_scratch(const Stream& s, int64_t tokens, int64_t heads) {
  const size_t bytes = kernels::cudnn_forward_scratch_bytes(tokens, heads);
  return s.scratch("softmax forward", DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}
inline Buffer softmax_backward_scratch(const Stream& s, const Tensor& dq_THd, int64_t heads,
                                       int64_t max_seqlen) {
  const int64_t group =
      kernels::cudnn_backward_heads(dq_THd.rows(), heads, dq_THd.cols() / heads, max_seqlen,
                                    dq_THd.row_stride, kDeterministicSoftmax);
  const size_t cudnn =
      group == 0 ? 0
                 : kernels::cudnn_backward_scratch_bytes(dq_THd.rows(), group, max_seqlen,
                                                         dq_THd.row_stride, kDeterministicSoftmax);
  const size_t bytes =
      std::max(kernels::softmax_backward_scratch_bytes(dq_THd.rows(), heads), cudnn);
  return s.scratch("softmax backward", DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}

// Softmax with a position bias: the portable kernels alone.
inline Buffer softmax_bias_scratch(const Stream& s, const char* name, size_t bytes) {
  return s.scratch(name, DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}
inline Buffer softmax_bias_forward_scratch(const Stream& s, PositionBias kind, int64_t tokens,
                                           int64_t heads, int64_t head_dim, int64_t max_seqlen) {
  if (kind != PositionBias::kFire) return {};
  return softmax_bias_scratch(
      s, "FIRE forward", kernels::fire_scratch(tokens, heads, head_dim, max_seqlen, false).bytes);
}
inline Buffer softmax_bias_backward_scratch(const Stream& s, PositionBias kind, int64_t tokens,
                                            int64_t heads, int64_t head_dim, int64_t max_seqlen) {
  return kind == PositionBias::kFire
             ? softmax_bias_scratch(
                   s, "FIRE backward",
                   kernels::fire_scratch(tokens, heads, head_dim, max_seqlen, true).bytes)
             : softmax_bias_scratch(s, "ALiBi backward",
                                    kernels::softmax_backward_scratch_bytes(tokens, heads));
}

}  // namespace sbtrain::ops::cuda
