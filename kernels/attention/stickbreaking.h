// Stick-breaking attention (arXiv 2410.17980, equations 1-4) over packed documents with mma.sync:
// any GPU from sm_80 on, any head dimension up to 256 that is a multiple of 8. ops/attention.h says
// what it computes, docs/developers/kernels.md how.
#pragma once

#include <algorithm>

#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

enum class StickRemainder : uint8_t {
  kNone,
  kValue,  // o_j += rem_j v_j
  kBias,   // o_j += rem_j r_h
};

// The scale of queries that have been multiplied by scale * log2(e): powers of two need no factor.
inline constexpr float kFoldedScale = 0.6931471805599453f;  // log(2)

// The keys of another rank that all are farther than those which the queries have seen before
// (ops/far_keys.h): the first `queries` rows of a problem see those of its keys from `key` on.
struct FarSticks {
  int queries = 0, key = 0;
  int first_query = 0;            // backward: of those that are computed at a time
  const float* before = nullptr;  // [H, T], log2 of the stick that the keys find
  float* w = nullptr;  // [H, T], backward: the gradient of what they leave, and then find
  // f32, +=. What the problem has in their places is not used.
  Matrix<float> o{}, dq{}, dk{}, dv{};
  Matrix<float> dgate{};  // [T, H], +=, with gates
};

struct StickBreakingProblem {
  int tokens = 0, heads = 0, head_dim = 0;
  float scale = 1.0f;
  float query_factor = 1.0f;  // by which q has been multiplied: dq is the gradient of q before that
  bool attend_current = false;
  StickRemainder remainder = StickRemainder::kNone;
  float skip_epsilon = 0.0f;  // 0 never skips
  int group = 1;  // heads of queries that share a head of keys and values, as in SoftmaxProblem
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  const int32_t* positions = nullptr;   // [T]
  int sequences = 0;
  HeadRows q{}, k{}, v{}, o{};
  const float* gate = nullptr;  // [T, H], optional
  int64_t gate_stride = 0;
  const bf16* remainder_bias = nullptr;  // [H, d], with kBias
  float* log2_rem = nullptr;             // [H, T]
  int32_t* stop = nullptr;               // [H, T], relative to the document
  // backward
  HeadRows dout{}, dq{}, dk{}, dv{};
  const float* drem = nullptr;  // [H, T], optional: of rem, apart from what flows through o
  bf16* dgate = nullptr;        // [T, H], with a gate
  int64_t dgate_stride = 0;
  float* dremainder_bias = nullptr;  // [H, d], with kBias
  // {log2 T, C} of each row at the left edge of each block of 64 keys, [workspace_heads,
  // workspace_blocks, T] pairs. The kernels for Hopper keep four pairs, of the rows of a segment of
  // workspace_tokens, or in a single pass one of each row (scratch_sizes.h).
  float* workspace = nullptr;
  int workspace_heads = 0, workspace_blocks = 0, workspace_tokens = 0;
  // Sums of dk and dv, f32 of stick_key_sums_bytes, where workspace_heads < group: the keys of a
  // head are then computed by several launches. Else workspace_heads is a multiple of the group.
  float* key_sums = nullptr;
  FarSticks far{};  // for the functions that say so
};

// How many heads from `first` on the backward pass computes together: groups, or a part of one.
inline int stick_heads_at_a_time(const StickBreakingProblem& p, int first) {
  const int end = p.workspace_heads < p.group ? first / p.group * p.group + p.group : p.heads;
  return std::min(end - first, p.workspace_heads);
}

// Writes o, log2_rem and stop.
void stickbreaking_forward(cudaStream_t stream, const StickBreakingProblem& problem);

// Adds to far.o, and writes log2_rem and stop of the rows before far.queries, for a problem without
// a remainder. A stop counts from far.key.
void stickbreaking_far_forward(cudaStream_t stream, const StickBreakingProblem& problem);

// Writes dq, dk, dv and dgate, the same bits on every run.
void stickbreaking_backward(cudaStream_t stream, const StickBreakingProblem& problem);

// Adds to far.dq, far.dk, far.dv and far.dgate and replaces far.w, the same bits on every run.
// workspace is of workspace_heads heads, whole groups, workspace_blocks blocks and workspace_tokens
// rows.
void stickbreaking_far_backward(cudaStream_t stream, const StickBreakingProblem& problem);

// dremainder_bias += the sum over tokens j of rem_j do_j, the same bits on every run. Both backward
// passes need it after them, with kBias. It overwrites stick_remainder_scratch_bytes of workspace.
void stickbreaking_remainder_vector(cudaStream_t stream, const StickBreakingProblem& problem);

}  // namespace sbtrain::kernels
