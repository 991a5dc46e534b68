// Stick-breaking and softmax attention over packed documents, and one step of decoding.
//
// Grouped queries (arXiv 2305.13245): G heads of keys and values, of which each serves the H / G
// heads of queries that follow each other. Head h of the queries reads head h / (H / G) where it
// lies; dk and dv of a head are sums over the queries of its group, in f32 and in the order of its
// heads. G divides H, and follows from the widths of q and k.
#pragma once

#include <string>

#include "core/sequences.h"
#include "kernels/attention/scratch_sizes.h"
#include "kernels/attention/stickbreaking.h"
#include "kernels/decode.h"
#include "ops/limits.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

enum class Implementation : uint8_t {
  kPortable,  // kernels/attention: mma.sync, every GPU from sm_80 on
  kCudnn,     // only softmax attention; packs that it declines go to the portable kernels
  kHopper,    // wgmma and TMA, compute capability 9.0; softmax attention only if it is asked for
};
// "portable", "cudnn", "hopper".
std::string_view implementation_name(Implementation implementation);

struct AttentionChoice {
  Implementation implementation = Implementation::kPortable;
  std::string reason{};  // why it is not the kernels for Hopper, or not cuDNN
  int64_t heads = 0;     // computed at a time: by cuDNN, and backward by stick-breaking attention
  int64_t blocks = 0;    // stick-breaking, backward: key blocks that a row can see
  int64_t tokens = 0;    // stick-breaking, backward: in one segment
  size_t key_sums = 0;   // stick-breaking, backward: where sums of dk and dv lie, or 0
  bool single_pass = false;  // stick-breaking, backward: not in two phases
  size_t hopper_part = 0;    // where the part of the scratch begins that the kernels for Hopper add
  size_t bytes = 0;          // scratch, enough for the portable kernels too
};
using AttentionScratch = Planned<AttentionChoice>;

// How many heads of queries share a head of keys and values: H / G.
inline int queries_of_key(const Tensor& q, const Tensor& k) {
  return static_cast<int>(q.cols() / k.cols());
}

// ---- Stick-breaking attention -----------------------------------------------------------------
//
// arXiv 2410.17980, equations 1-4. For token j and keys i < j (i <= j with attend_current) of the
// same document:
//   z_ij = scale q_j.k_i   beta_ij = f_i sigmoid(z_ij)   A_ij = beta_ij prod_{i<k<j} (1 - beta_kj)
//   o_j = sum_i A_ij v_i   rem_j = 1 - sum_i A_ij
// f_i is the forget gate, 1 without one. q and o are [T, H*d], k and v are [T, G*d]; q, k, v may be
// column ranges of one qkv matrix.

using Remainder = kernels::StickRemainder;
struct StickBreakingParams {
  int heads = 0;
  float scale = 1.0f;
  // By which q has been multiplied: dq is the gradient of q before that. If it was scale * log2(e),
  // scale is kernels::kFoldedScale, and the kernels for Hopper save a multiplication for each pair.
  float query_factor = 1.0f;
  bool attend_current = false;
  Remainder remainder = Remainder::kNone;
  // Keys to the left of the point where every query of a tile has rem < skip_epsilon are skipped,
  // in the forward pass and, through the saved stop, in the backward pass. 0 never skips any.
  float skip_epsilon = 0.0f;
};
// The number of queries in a tile. They share one stop, the first key (relative to the document)
// that the tile reads.
inline constexpr int kStickBreakingTile = 64;

struct StickBreakingForward {
  static constexpr std::string_view kName = "stickbreaking_forward";
  Tensor o_THd;
  Tensor log2_rem_HT;  // f32, log2 of the remainder after all keys, which does not underflow
  Tensor stop_HT;      // i32: for each query its tile's first key, relative to its document
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};            // f in (0, 1], f32, optional
  Tensor remainder_bias_Hd{};  // r_h, with Remainder::kBias
  Sequences sequences{};
  StickBreakingParams params{};
  void check() const;
  void check_limits(const Target& target) const {
    check_attention_heads(kName, q_THd, params.heads, target);
  }
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};

// The forward pass saves O(T). On the CPU scratch is O(tile * max_seqlen) for each thread; on CUDA
// it holds the states that ops/choose.h describes. Deterministic.
struct StickBreakingBackward {
  static constexpr std::string_view kName = "stickbreaking_backward";
  Tensor dq_THd, dk_THd, dv_THd;  // =
  Tensor dgate_TH{};              // =, with a gate
  Tensor dremainder_bias_Hd{};    // +=, with Remainder::kBias
  Tensor do_THd;
  Tensor drem_HT{};  // f32, optional: of rem = 2^log2_rem where the loss uses it other than by o
  Tensor log2_rem_HT, stop_HT;  // from the forward pass
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};
  Tensor remainder_bias_Hd{};
  Sequences sequences{};
  StickBreakingParams params{};
  void check() const;
  void check_limits(const Target& target) const {
    check_attention_heads(kName, q_THd, params.heads, target);
  }
  AttentionScratch scratch(const Stream& s) const {
    return plan<AttentionChoice>(s, *this, "stick-breaking states");
  }
};

// ---- Softmax attention --------------------------------------------------------------------------
//
// Causal (i <= j), document-masked: o_j = sum_i softmax_i(scale q_j.k_i + bias_h(i, j)) v_i, with i
// and j counted from 0 in each document.

struct SoftmaxParams {
  int heads = 0;
  float scale = 1.0f;
  int64_t window = 0;  // > 0: only the `window` nearest keys, the token itself included
};

enum class PositionBias : uint8_t {
  kNone,
  kAlibi,  // -m_h (j - i)  (arXiv 2108.12409)
  kFire,   // MLP(psi(j - i) / (psi(max(j, |m L0|)) + 1e-6))_h, psi(x) = log(|c| x + 1), and the MLP
           // is 1 -> 32 -> H with ReLU  (arXiv 2310.04418)
};
inline constexpr int kFireHidden = kernels::kFireUnits;
inline constexpr float kFireLength = kernels::kFireLength;  // L0, unless a model has another
inline constexpr float kFireEps = 1e-6f;

// m_h: 2^(-8h/P), h = 1..P, for P = 2^floor(log2 H) heads; the others take 2^(-8(2k-1)/(2P)),
// k = 1..H-P. `head` counts from 0.
float alibi_slope(int heads, int head);

// The tensors of FIRE: its parameters or, f32, their gradients. K = kFireHidden.
struct FireTensors {
  Tensor c_1, m_1, w1_K, b1_K, w2_HK, b2_H;
  float length = kFireLength;                 // L0; gradients have no use for it
  operator kernels::FireParameters() const {  // NOLINT: as the kernels take them
    return {c_1, m_1, w1_K, b1_K, w2_HK, b2_H, length};
  }
  operator kernels::FireGradients() const { return {c_1, m_1, w1_K, b1_K, w2_HK}; }  // NOLINT
};
struct SoftmaxBias {
  PositionBias kind = PositionBias::kNone;
  FireTensors fire{};  // with kFire
};

struct SoftmaxForward {
  static constexpr std::string_view kName = "softmax_forward";
  Tensor o_THd;
  Tensor lse_HT;  // f32, log of the softmax denominator
  Tensor q_THd, k_THd, v_THd;
  SoftmaxBias bias{};
  Sequences sequences{};
  SoftmaxParams params{};
  void check() const;
  void check_limits(const Target& target) const;
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};
struct SoftmaxBackward {
  static constexpr std::string_view kName = "softmax_backward";
  Tensor dq_THd, dk_THd, dv_THd;  // =
  FireTensors dfire{};            // += gradients of bias.fire, with kFire
  Tensor do_THd, o_THd, lse_HT;
  Tensor q_THd, k_THd, v_THd;
  SoftmaxBias bias{};
  Sequences sequences{};
  SoftmaxParams params{};
  void check() const;
  void check_limits(const Target& target) const;
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};

// ---- Decoding -----------------------------------------------------------------------------------
//
// One new token for each of B independent sequences against its cached keys and values.
// k_cache, v_cache: [B, C, G*d], rows [0, lengths_B[b]) valid, the new token's own k and v last.
// With k_BGd and v_BGd, the new token's own k and v, the op writes them to their rows of the caches
// itself.
//
// On CUDA, as on the CPU, the bits of a sequence do not depend on the others.

struct StickBreakingDecode {
  static constexpr std::string_view kName = "stickbreaking_decode";
  Tensor o_BHd;
  Tensor q_BHd;
  Tensor k_BGd{}, v_BGd{};
  Tensor k_cache_BCGd, v_cache_BCGd;
  Tensor gate_cache_BCH{};  // with a forget gate
  Tensor remainder_bias_Hd{};
  Tensor lengths_B;  // i32, the new token included
  StickBreakingParams params;
  void check() const;
  void check_limits(const Target&) const { check_decode_heads(kName, q_BHd, params.heads); }
  Buffer scratch(const Stream& s) const;
};
struct SoftmaxDecode {
  static constexpr std::string_view kName = "softmax_decode";
  Tensor o_BHd;
  Tensor q_BHd;
  Tensor k_BGd{}, v_BGd{};
  Tensor k_cache_BCGd, v_cache_BCGd;
  Tensor lengths_B;
  SoftmaxBias bias{};
  SoftmaxParams params;
  void check() const;
  void check_limits(const Target& target) const;
  Buffer scratch(const Stream& s) const;
};

// cache_BCN[b, positions_B[b]] = x_BN[b]; x may have strided rows. A position outside the cache is
// an error.
struct CacheAppend {
  static constexpr std::string_view kName = "cache_append";
  Tensor cache_BCN;
  Tensor x_BN, positions_B;
  void check() const;
  kernels::CacheAppend kernel() const {
    const auto& [batch, capacity, cols, none] = cache_BCN.shape;
    return {cache_BCN.dtype, cache_BCN.data, x_BN, positions_B, batch, capacity, cols};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const StickBreakingForward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const StickBreakingBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const StickBreakingDecode& op, const Buffer& scratch);
void run(Cpu, Stream& s, const SoftmaxForward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const SoftmaxBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const SoftmaxDecode& op, const Buffer& scratch);
void run(Cpu, Stream& s, const CacheAppend& op);

// Their scratch depends only on the threads, head_dim and max_seqlen, never on the documents of a
// pack.
Buffer scratch(const Stream& s, const StickBreakingForward& op);
Buffer scratch(const Stream& s, const StickBreakingBackward& op);
Buffer scratch(const Stream& s, const SoftmaxForward& op);
Buffer scratch(const Stream& s, const SoftmaxBackward& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const StickBreakingForward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const StickBreakingBackward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const StickBreakingDecode& op, const Buffer& scratch);
void run(Cuda, Stream& s, const SoftmaxForward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const SoftmaxBackward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const SoftmaxDecode& op, const Buffer& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
