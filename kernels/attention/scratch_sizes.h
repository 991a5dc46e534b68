// Scratch of the attention kernels in bytes: plain arithmetic, so that memory can be planned on a
// machine without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

constexpr size_t align_scratch(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// ---- kernels/attention/softmax.h ----------------------------------------------------------------

// rowsum(do * o) of every query and head, f32 [H, T].
constexpr size_t softmax_backward_scratch_bytes(int64_t tokens, int64_t heads) {
  return align_scratch(static_cast<size_t>(tokens * heads) * sizeof(float));
}

// ---- kernels/attention/softmax_bias.h -----------------------------------------------------------

inline constexpr int kFireUnits = 32;
// Tiles meet pairs that are masked: distances this far beyond those of a document.
inline constexpr int64_t kFireMargin = 256;
// Of one block of keys: sums of {dz, dz u} over each of 33 segments and above each of 32
// breaks, and the gradients of c and m.
inline constexpr int64_t kFireSums = 2 * (kFireUnits + 1 + kFireUnits + 1);
// Keys of a block in the backward pass.
inline constexpr int64_t kFireBlockKeys = 128;

// Where things lie in the scratch of FIRE, in bytes from its start.
struct FireScratch {
  size_t distances;  // f32 [max_seqlen + 2 * margin, 2]
  size_t r;          // f32 [T + margin]
  size_t breaks;     // f32 [32]
  size_t lines;      // f32 [H, 33, 2]
  size_t bends;      // f32 [H, 32]
  size_t queries;    // f32 [T + margin, 4]; from here on: backward
  size_t delta;      // f32 [H, T]
  size_t partials;   // f32 [H, blocks, kFireSums]
  size_t units;      // f64 [H, 32, 2]
  size_t heads;      // f64 [H, 2]
  size_t bytes;
};
constexpr FireScratch fire_scratch(int64_t tokens, int64_t heads, int64_t max_seqlen,
                                   bool backward) {
  FireScratch s{};
  const auto take = [&](int64_t count, size_t size) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(count) * size);
    return begin;
  };
  s.distances = take(2 * (max_seqlen + 2 * kFireMargin), sizeof(float));
  s.r = take(tokens + kFireMargin, sizeof(float));
  s.breaks = take(kFireUnits, sizeof(float));
  s.lines = take(heads * (kFireUnits + 1) * 2, sizeof(float));
  s.bends = take(heads * kFireUnits, sizeof(float));
  if (!backward) return s;
  s.queries = take(4 * (tokens + kFireMargin), sizeof(float));
  s.delta = take(heads * tokens, sizeof(float));
  s.partials =
      take(heads * ((tokens + kFireBlockKeys - 1) / kFireBlockKeys) * kFireSums, sizeof(float));
  s.units = take(heads * kFireUnits * 2, sizeof(double));
  s.heads = take(heads * 2, sizeof(double));
  return s;
}

// ---- cuDNN (src/ops/cuda/cudnn_attention.h) -----------------------------------------------------

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

// Upper bounds of what cuDNN itself takes. Derived from its frontend's graphs plus a margin of
// descriptors for each document, not documented by NVIDIA; what a plan really wants is compared
// with what there is before it runs.
constexpr size_t cudnn_margin(int64_t batch) {
  return (size_t{4} << 20) + static_cast<size_t>(batch) * 4096;
}
constexpr size_t cudnn_forward_workspace_bytes(int64_t batch) {
  return cudnn_margin(batch);
}
// The deterministic algorithm keeps dS of the whole padded batch, bf16 [B, H, S, S]; the other one
// adds up dq in f32, laid out like dq (rows of `dq_stride` elements).
constexpr size_t cudnn_backward_workspace_bytes(int64_t tokens, int64_t heads, int64_t batch,
                                                int64_t max_seqlen, int64_t dq_stride,
                                                bool deterministic) {
  const int64_t rows = (max_seqlen + 127) / 128 * 128;
  const int64_t scores = batch * heads * rows * rows * 2;
  const int64_t sums = tokens * dq_stride * static_cast<int64_t>(sizeof(float));
  return static_cast<size_t>(deterministic ? scores : sums) +
         cudnn_statistics_bytes(tokens, heads) + cudnn_margin(batch);
}

// What the launchers plan: enough for packs of as few documents as there can be; packs of more are
// left to the portable kernels if they want more. Depends on nothing that changes from step to
// step.
constexpr int64_t cudnn_planned_batch(int64_t tokens, int64_t max_seqlen) {
  const int64_t fewest = max_seqlen > 0 ? (tokens + max_seqlen - 1) / max_seqlen : 1;
  return cudnn_batch(std::min(fewest, kMaxCudnnDocuments));
}
constexpr size_t cudnn_forward_scratch_bytes(int64_t tokens, int64_t heads) {
  return cudnn_statistics_bytes(tokens, heads) + cudnn_index_bytes(kMaxCudnnDocuments) +
         cudnn_forward_workspace_bytes(kMaxCudnnDocuments);
}
constexpr size_t cudnn_backward_scratch_bytes(int64_t tokens, int64_t heads, int64_t max_seqlen,
                                              int64_t dq_stride, bool deterministic) {
  return cudnn_statistics_bytes(tokens, heads) + cudnn_index_bytes(kMaxCudnnDocuments) +
         cudnn_backward_workspace_bytes(tokens, heads, cudnn_planned_batch(tokens, max_seqlen),
                                        max_seqlen, dq_stride, deterministic);
}
// Whether the portable kernels are the faster ones in the backward pass (H200): for narrow heads,
// 147 against 122 TFLOP/s (d = 32, L = 2048, deterministic), and where cuDNN's deterministic
// algorithm, which computes what a window hides too, would do twice what is needed (64 channels) or
// more (128).
constexpr bool prefers_portable_backward(int64_t head_dim, int64_t max_seqlen, int64_t window,
                                         bool deterministic) {
  const int64_t narrow = head_dim <= 64 ? max_seqlen / 2 : max_seqlen / 4;
  return head_dim <= 32 || (deterministic && window > 0 && window <= narrow);
}
// Heads that cuDNN's backward pass takes at a time, so that its scratch fits kMaxCudnnScratch; 0
// where not even one fits or the portable kernels are preferred.
constexpr int64_t cudnn_backward_heads(int64_t tokens, int64_t heads, int64_t head_dim,
                                       int64_t max_seqlen, int64_t window, int64_t dq_stride,
                                       bool deterministic) {
  if (prefers_portable_backward(head_dim, max_seqlen, window, deterministic)) return 0;
  for (int64_t group = heads; group > 0; --group) {
    if (heads % group == 0 && cudnn_backward_scratch_bytes(tokens, group, max_seqlen, dq_stride,
                                                           deterministic) <= kMaxCudnnScratch) {
      return group;
    }
  }
  return 0;
}

}  // namespace sbtrain::kernels
