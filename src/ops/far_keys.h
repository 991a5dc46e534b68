// Attention of some queries to keys of other ranks, farther than every key that the queries have
// seen so far. Where ranks share the tokens of a micro-batch (attention/context.h), each computes
// the attention among its own tokens by the ops of ops/attention.h, and then adds the keys of one
// rank after the other.
//
// Each of n ranks has T of the tokens. Of a rank, the first `queries` tokens see the last `keys`
// tokens of an earlier one, all of them: they belong to the one document that goes on from there.
// Where either is 0 an op does nothing. Sums with += are f32, on CUDA too.
#pragma once

#include "ops/attention.h"

namespace sbtrain::ops {

struct FarKeys {
  int64_t queries = 0;
  int64_t keys = 0;
};

// ---- Stick-breaking attention -------------------------------------------------------------------
//
// A range of keys takes from what the nearer ones have left of the stick. With o_K and l_K, the
// output and the log2 of the remainder of the range alone (arXiv 2410.17980, equations 1-4, over
// its keys), and l, that of all nearer keys:
//   o += 2^l o_K    l <- l + l_K
// Backward, W is the gradient of the remainder: W_far of what is left after the range, W_near of
// what it finds. Inside of the range they are the ends of the recursion of
// ops/cpu/stickbreaking_tile.h:
//   W_near = do.o_K + 2^l_K W_far
// and the nearest range, a rank's own keys, takes its W as drem_HT (StickBreakingBackward).

struct StickBreakingFarForward {
  static constexpr std::string_view kName = "stickbreaking_far_forward";
  Tensor o_THd;        // +=
  Tensor log2_rem_HT;  // f32, after the range
  Tensor stop_HT;      // i32, the first key that the query's tile reads; all `keys`: none
  Tensor before_HT;    // f32, log2 of the remainder that the range finds
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};  // f32, of the keys, optional
  FarKeys far{};
  StickBreakingParams params{};  // without a remainder
  void check() const;
  void check_limits(const Target& target) const {
    check_attention_heads(kName, q_THd, params.heads, target);
  }
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};

struct StickBreakingFarBackward {
  static constexpr std::string_view kName = "stickbreaking_far_backward";
  Tensor dq_THd, dk_THd, dv_THd;  // +=
  Tensor dgate_TH{};              // +=, f32, with a gate
  Tensor w_HT;                    // f32: W_far becomes W_near
  Tensor do_THd;
  Tensor before_HT, log2_rem_HT, stop_HT;  // from the forward pass
  Tensor q_THd, k_THd, v_THd;
  Tensor gate_TH{};
  FarKeys far{};
  StickBreakingParams params{};
  void check() const;
  void check_limits(const Target& target) const {
    check_attention_heads(kName, q_THd, params.heads, target);
  }
  AttentionScratch scratch(const Stream& s) const {
    return plan<AttentionChoice>(s, *this, "stick-breaking states");
  }
};

// What is left after the farthest range goes to the token's own value or to the head's vector, as
// params.remainder says; not Remainder::kNone. The ops of the ranges, a rank's own keys among them,
// know nothing of it. With x_j = v_j or r_h,
//   o_j += rem_j x_j    W of the farthest range = do_j.x_j
//   dv_j += rem_j do_j, summed over the heads that share v_j, or dr_h += sum_j rem_j do_j
struct AddRemainder {
  static constexpr std::string_view kName = "add_remainder";
  Tensor o_THd;        // f32, +=
  Tensor log2_rem_HT;  // f32, after all ranges
  Tensor v_THd;
  Tensor remainder_bias_Hd{};
  StickBreakingParams params{};
  void check() const;
};

struct RemainderGradient {
  static constexpr std::string_view kName = "remainder_gradient";
  Tensor w_HT;  // f32, =
  Tensor do_THd;
  Tensor v_THd;
  Tensor remainder_bias_Hd{};
  StickBreakingParams params{};
  void check() const;
};

struct AddRemainderBackward {
  static constexpr std::string_view kName = "add_remainder_backward";
  Tensor dv_THd{};              // f32, +=, with Remainder::kValue
  Tensor dremainder_bias_Hd{};  // f32, +=, with Remainder::kBias
  Tensor do_THd, log2_rem_HT;
  StickBreakingParams params{};
  void check() const;
  Buffer scratch(const Stream& s) const;
};

namespace cpu {
void run(Cpu, Stream& s, const StickBreakingFarForward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const StickBreakingFarBackward& op, const Buffer& scratch);
Buffer scratch(const Stream& s, const StickBreakingFarForward& op);
Buffer scratch(const Stream& s, const StickBreakingFarBackward& op);
void run(Cpu, Stream& s, const AddRemainder& op);
void run(Cpu, Stream& s, const RemainderGradient& op);
void run(Cpu, Stream& s, const AddRemainderBackward& op, const Buffer& scratch);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const StickBreakingFarForward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const StickBreakingFarBackward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const AddRemainder& op);
void run(Cuda, Stream& s, const RemainderGradient& op);
void run(Cuda, Stream& s, const AddRemainderBackward& op, const Buffer& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
