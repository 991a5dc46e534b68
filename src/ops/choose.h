// The one place that chooses which implementation of an op runs on a GPU, and that knows the
// scratch it takes. Plain arithmetic on the problem and the target, so that memory can be planned
// where no GPU is; a new kernel for a GPU is one line here.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "core/target.h"
#include "ops/attention.h"
#include "ops/rebased.h"

namespace sbtrain::ops {

enum class Implementation : uint8_t {
  kPortable,  // kernels/attention: mma.sync, every GPU from sm_80 on
  kCudnn,     // softmax attention alone; where it declines a pack, the portable kernels take over
};
std::string_view implementation_name(Implementation implementation);  // "portable", "cudnn"

// ---- Softmax attention --------------------------------------------------------------------------

struct SoftmaxShape {
  bool backward = false;
  PositionBias bias = PositionBias::kNone;
  int64_t tokens = 0, heads = 0, head_dim = 0, max_seqlen = 0, window = 0;
  int64_t dq_stride = 0;  // backward
  bool deterministic = true;
};
struct SoftmaxChoice {
  Implementation implementation = Implementation::kPortable;
  std::string reason{};  // that it is not cuDNN
  int64_t heads = 0;     // that cuDNN takes at a time
  size_t bytes = 0;      // of scratch, enough for the portable kernels too
};
// `forced` is an implementation's name or empty. Throws ExitCode::kUsage where it is neither, or
// where it cannot do the problem.
SoftmaxChoice choose(const SoftmaxShape& shape, const Target& target, std::string_view forced = {});
// For the stream's target, with what is forced on the stream.
SoftmaxChoice choose(const SoftmaxForward& op, const Stream& s);
SoftmaxChoice choose(const SoftmaxBackward& op, const Stream& s);

// ---- Stick-breaking attention -------------------------------------------------------------------

// The backward pass keeps, for each row and each block of 64 keys of its document, the state
// {log2 T, C} in which the block begins (kernels/attention/stickbreaking.h). It is the one thing
// that grows with T * L, so heads go through it in groups that fit a fixed budget.
struct StickBreakingChoice {
  Implementation implementation = Implementation::kPortable;
  int64_t blocks = 0;  // key blocks that a row can see
  int64_t heads = 0;   // in one group
};
StickBreakingChoice choose(const StickBreakingBackward& op, const Stream& s);

// ---- Based and ReBased --------------------------------------------------------------------------

// Where no document is longer than this, the chunked form forms all pairs too, of e values a head.
// On an H200, milliseconds forward / backward of 32768 tokens, 16 features, width 1536, pairs
// against states: e = 16: 1.69 / 5.02 against 1.79 / 5.56 at L = 1024, 3.05 / 8.66 against 1.84
// / 5.62 at 2048; e = 64: 1.35 / 3.78 against 1.54 / 4.52 at 2048, 2.49 / 6.81 against 1.58 / 4.55
// at 4096.
constexpr int64_t rebased_pairs(int64_t e) {
  return e < 64 ? 1024 : 2048;
}

struct RebasedChoice {
  bool chunked = false;  // with the states of all chunks, of some heads at a time; else all pairs
  int64_t heads = 0;     // in one group
  int64_t state = 0;     // floats of one head
};
RebasedChoice choose(const RebasedForward& op, const Stream& s);
RebasedChoice choose(const RebasedBackward& op, const Stream& s);
RebasedChoice choose(const RebasedState& op, const Stream& s);  // always chunked

// ---- Scratch of cuDNN ---------------------------------------------------------------------------

constexpr size_t align_scratch(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Packs of more documents than this are left to the portable kernels.
inline constexpr int64_t kMaxCudnnDocuments = 4096;
// What cuDNN may take at most, all in all; where it wants more the portable kernels run.
inline constexpr size_t kMaxCudnnScratch = size_t{8} << 30;

// The batch dimension of cuDNN's plans for so many documents: four steps an octave, so that few
// plans are built while the number of documents changes and few empty documents are added.
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
// An upper bound of what cuDNN itself takes for `heads` heads in a batch of so many documents.
size_t cudnn_workspace_bytes(const SoftmaxShape& shape, int64_t heads, int64_t batch);
// All in all, enough for packs of as few documents as there can be; packs of more are left to the
// portable kernels if they want more. Depends on nothing that changes from step to step.
size_t cudnn_scratch_bytes(const SoftmaxShape& shape, int64_t heads);

}  // namespace sbtrain::ops
