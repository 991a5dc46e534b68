// Chooses which implementation of an op runs on a GPU, and states the scratch that it takes; no
// other place does either. It is plain arithmetic on the problem and the target, so that memory can
// be planned on a machine without a GPU. A new kernel for a GPU is one line here.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "core/target.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/attention.h"
#include "ops/rebased.h"

namespace sbtrain::ops {

// ---- Softmax attention --------------------------------------------------------------------------

struct SoftmaxShape {
  bool backward = false;
  PositionBias bias = PositionBias::kNone;
  int64_t tokens = 0, heads = 0, head_dim = 0, max_seqlen = 0, window = 0;
  int64_t dq_stride = 0;  // backward
  bool deterministic = true;
  int64_t group = 1;  // heads of queries that share a head of keys and values
  bool far = false;   // the keys are those of another rank (ops/far_softmax.h); never by cuDNN
};
// `forced` is the name of an implementation, or empty. Throws ExitCode::kUsage if it is neither, or
// if that implementation cannot compute the problem.
AttentionChoice choose(const SoftmaxShape& shape, const Target& target,
                       std::string_view forced = {});

// ---- Stick-breaking attention -------------------------------------------------------------------

// The backward pass keeps, for each row and each block of 64 keys of its document, the state
// {log2 T, C} at the block's left edge (kernels/attention/stickbreaking.h), or on Hopper four such
// states in the block. Nothing else grows with T * L, so as many heads are computed at a time as
// have states that fit a fixed budget, with all heads that share their keys; where that is not
// possible, the sums of dk and dv go from some heads to the next. On Hopper one head is cut into
// segments of queries and keys where it does not fit (kernels/attention/scratch_sizes.h). A single
// pass on Hopper keeps one state of each row and sums of dq, which grow with T alone. The forward
// passes save the same everywhere. Over the keys of another rank the two phases keep the same
// states, of fewer queries at a time where not even one group of heads fits.
struct StickBreakingShape {
  bool backward = false;
  int64_t tokens = 0, heads = 0, head_dim = 0, max_seqlen = 0;
  bool gated = false;
  bool learned_remainder = false;
  int64_t group = 1;  // heads of queries that share a head of keys and values
  bool far = false;   // the keys are those of another rank (ops/far_keys.h)
};
// `forced` as above.
AttentionChoice choose(const StickBreakingShape& shape, const Target& target,
                       std::string_view forced = {});

// ---- Based and ReBased --------------------------------------------------------------------------

// If no document is longer than this, the chunked form too computes all pairs; heads have e values.
// Milliseconds on an H200, forward / backward, all pairs against states (32768 tokens, 16 features,
// width 1536): for e = 16, 1.69 / 5.02 against 1.79 / 5.56 at L = 1024 and 3.05 / 8.66 against 1.84
// / 5.62 at 2048; for e = 64, 1.35 / 3.78 against 1.54 / 4.52 at 2048 and 2.49 / 6.81 against 1.58
// / 4.55 at 4096.
constexpr int64_t rebased_pairs(int64_t e) {
  return e < 64 ? 1024 : 2048;
}

// ---- Scratch of cuDNN ---------------------------------------------------------------------------

using kernels::align_scratch;

// Packs of more documents than this go to the portable kernels.
inline constexpr int64_t kMaxCudnnDocuments = 4096;
// The most scratch that cuDNN may take in all; where it needs more, the portable kernels run.
inline constexpr size_t kMaxCudnnScratch = size_t{8} << 30;

// The batch dimension of cuDNN's plan for this many documents. It has four steps between powers of
// two, so that few plans are built as the number changes, and few empty documents are added.
constexpr int64_t cudnn_batch(int64_t documents) {
  int64_t step = 1;
  while (documents > step * 8) step *= 2;
  return std::max<int64_t>(1, (documents + step - 1) / step * step);
}
// Offsets of up to nine tensors, and lengths, of each document.
constexpr size_t cudnn_index_bytes(int64_t batch) {
  return align_scratch(static_cast<size_t>(batch + 1) * (9 * sizeof(int64_t) + sizeof(int32_t)));
}
// Log-sum-exp in cuDNN's layout, f32 [T, H].
constexpr size_t cudnn_statistics_bytes(int64_t tokens, int64_t heads) {
  return align_scratch(static_cast<size_t>(tokens * heads) * sizeof(float));
}
// An upper bound of what cuDNN itself takes for `heads` heads in a batch of `batch` documents.
size_t cudnn_workspace_bytes(const SoftmaxShape& shape, int64_t heads, int64_t batch);
// The whole scratch, enough for packs of as few documents as possible. A pack of more documents
// goes to the portable kernels if it needs more. Depends on nothing that changes from step to step.
size_t cudnn_scratch_bytes(const SoftmaxShape& shape, int64_t heads);

}  // namespace sbtrain::ops
