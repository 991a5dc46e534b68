// Scratch that only ops of the CUDA backend take. Needs no CUDA header: every build plans with it.
#pragma once

#include <algorithm>

#include "core/error.h"
#include "core/stream.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/rebased.h"
#include "ops/softmax_bias.h"

namespace sbtrain::ops::cuda {

// Heads that go through a workspace at a time where one takes `bytes`: as many as fit a fixed
// budget, at least one, in groups as equal as can be.
inline int64_t heads_at_a_time(int64_t heads, int64_t bytes) {
  constexpr int64_t kBudget = int64_t{512} << 20;  // bytes
  const int64_t fit = std::max<int64_t>(1, kBudget / std::max<int64_t>(1, bytes));
  const int64_t groups = (heads + fit - 1) / fit;
  return (heads + groups - 1) / groups;
}

// Stick-breaking backward: for each row and each block of 64 keys of its document the state
// {log2 T, C} in which the block begins (see kernels/attention/stickbreaking.h). It is the one
// thing that grows with T * L, so heads go through it in groups that fit a fixed budget.
struct StickBreakingWorkspace {
  int64_t blocks = 0;  // key blocks that a row can see
  int64_t heads = 0;   // in one group
};
inline StickBreakingWorkspace stickbreaking_workspace(int64_t tokens, int64_t heads,
                                                      int64_t max_seqlen) {
  StickBreakingWorkspace w;
  w.blocks = (max_seqlen + 126) / 64 + 2;
  w.heads = heads_at_a_time(heads, tokens * w.blocks * 8);
  return w;
}
inline Buffer stickbreaking_backward_scratch(const Stream& s, int64_t tokens, int64_t heads,
                                             int64_t max_seqlen) {
  const StickBreakingWorkspace w = stickbreaking_workspace(tokens, heads, max_seqlen);
  return s.scratch("stick-breaking states", DType::kF32, {w.heads, w.blocks, tokens, 2});
}

// Softmax: whichever of cuDNN and the portable kernels takes more.
inline Buffer softmax_forward_scratch(const Stream& s, int64_t tokens, int64_t heads) {
  const size_t bytes = kernels::cudnn_forward_scratch_bytes(tokens, heads);
  return s.scratch("softmax forward", DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}
inline Buffer softmax_backward_scratch(const Stream& s, const Tensor& dq_THd, int64_t heads,
                                       int64_t max_seqlen, int64_t window) {
  const int64_t group =
      kernels::cudnn_backward_heads(dq_THd.rows(), heads, dq_THd.cols() / heads, max_seqlen, window,
                                    dq_THd.row_stride, s.deterministic());
  const size_t cudnn =
      group == 0 ? 0
                 : kernels::cudnn_backward_scratch_bytes(dq_THd.rows(), group, max_seqlen,
                                                         dq_THd.row_stride, s.deterministic());
  const size_t bytes =
      std::max(kernels::softmax_backward_scratch_bytes(dq_THd.rows(), heads), cudnn);
  return s.scratch("softmax backward", DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}

// Based and ReBased: where no document is longer than this, the chunked form goes over all pairs
// too. On an H200, milliseconds forward / backward of 32768 tokens, 16 features, width 1536, pairs
// against states:
// e = 16: 1.69 / 5.02 against 1.79 / 5.56 at L = 1024, 3.05 / 8.66 against 1.84 / 5.62 at 2048;
// e = 64: 1.35 / 3.78 against 1.54 / 4.52 at 2048, 2.49 / 6.81 against 1.58 / 4.55 at 4096.
constexpr int64_t rebased_pairs(int64_t e) {
  return e < 64 ? 1024 : 2048;
}
inline void check_rebased_heads(int64_t f, int64_t e) {
  if (f <= kernels::kMaxRebasedFeatures && e <= kernels::kMaxRebasedValues) return;
  fail(ExitCode::kConfig,
       "Based and ReBased on CUDA: heads have {} features (model.attention.feature_dim) and {} "
       "values (model.width / model.heads); at most {} and {} are possible",
       f, e, kernels::kMaxRebasedFeatures, kernels::kMaxRebasedValues);
}
// The states of all chunks, of some heads at a time.
struct RebasedWorkspace {
  bool chunked = false;
  int64_t heads = 0;  // in one group
  int64_t state = 0;  // floats of one head
};
inline RebasedWorkspace rebased_workspace(int64_t tokens, int64_t f, int64_t e,
                                          const RebasedParams& params, int64_t max_seqlen) {
  check_rebased_heads(f, e);
  RebasedWorkspace w;
  w.chunked = !params.quadratic && max_seqlen > rebased_pairs(e);
  w.state = rebased_state_rows(f, params) * (e + 1);
  w.heads = heads_at_a_time(params.heads, kernels::rebased_chunks(tokens) * w.state * 4);
  return w;
}
// Of the op that wants a state.
inline RebasedWorkspace rebased_state_workspace(int64_t tokens, int64_t f, int64_t e,
                                                const RebasedParams& params) {
  RebasedWorkspace w = rebased_workspace(tokens, f, e, params, 0);
  w.chunked = true;
  return w;
}
inline Buffer rebased_forward_scratch(const Stream& s, int64_t tokens, const RebasedWorkspace& w) {
  if (!w.chunked) return {};
  return s.scratch("rebased states", DType::kF32,
                   {kernels::rebased_chunks(tokens), w.heads, w.state});
}
// Besides, rowsum(do * o) of every query and head.
inline Buffer rebased_backward_scratch(const Stream& s, int64_t tokens, int64_t heads,
                                       const RebasedWorkspace& w) {
  const int64_t states = w.chunked ? kernels::rebased_chunks(tokens) * w.heads * w.state : 0;
  return s.scratch("rebased backward", DType::kF32, {states + heads * tokens});
}

// Softmax with a position bias: the portable kernels alone.
inline Buffer softmax_bias_scratch(const Stream& s, const char* name, size_t bytes) {
  return s.scratch(name, DType::kF32, {static_cast<int64_t>(bytes / sizeof(float))});
}
inline Buffer softmax_bias_forward_scratch(const Stream& s, PositionBias kind, int64_t tokens,
                                           int64_t heads, int64_t max_seqlen) {
  if (kind != PositionBias::kFire) return {};
  return softmax_bias_scratch(s, "FIRE forward",
                              kernels::fire_scratch(tokens, heads, max_seqlen, false).bytes);
}
inline Buffer softmax_bias_backward_scratch(const Stream& s, PositionBias kind, int64_t tokens,
                                            int64_t heads, int64_t max_seqlen) {
  return kind == PositionBias::kFire
             ? softmax_bias_scratch(s, "FIRE backward",
                                    kernels::fire_scratch(tokens, heads, max_seqlen, true).bytes)
             : softmax_bias_scratch(s, "ALiBi backward",
                                    kernels::softmax_backward_scratch_bytes(tokens, heads));
}

}  // namespace sbtrain::ops::cuda
