// Softmax attention of some queries to keys of other ranks (ops/far_keys.h): what a range of keys
// gives is merged with what other ranges have given, in any order.
//
// With o and lse of all keys so far, and o_K and lse_K of the range alone (ops/attention.h):
//   lse' = log(exp(lse) + exp(lse_K))    o' = exp(lse - lse') o + exp(lse_K - lse') o_K
// Backward, the ranges need o and lse after all of them, and nothing of each other.
#pragma once

#include "ops/far_keys.h"

namespace sbtrain::ops {

struct SoftmaxFarForward {
  static constexpr std::string_view kName = "softmax_far_forward";
  Tensor o_THd;   // f32: of the keys so far, becomes that of these keys as well
  Tensor lse_HT;  // f32, likewise
  Tensor q_THd, k_THd, v_THd;
  SoftmaxBias bias{};  // no FIRE
  FarKeys far{};
  int64_t distance = 0;  // how many tokens before the queries' first one the keys' first one lies
  SoftmaxParams params{};
  void check() const;
  void check_limits(const Target& target) const;
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};

struct SoftmaxFarBackward {
  static constexpr std::string_view kName = "softmax_far_backward";
  Tensor dq_THd, dk_THd, dv_THd;  // f32, +=
  Tensor do_THd, o_THd, lse_HT;   // after all ranges
  Tensor q_THd, k_THd, v_THd;
  SoftmaxBias bias{};
  FarKeys far{};
  int64_t distance = 0;
  SoftmaxParams params{};
  void check() const;
  void check_limits(const Target& target) const;
  AttentionScratch scratch(const Stream& s) const { return plan<AttentionChoice>(s, *this); }
};

namespace cpu {
void run(Cpu, Stream& s, const SoftmaxFarForward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const SoftmaxFarBackward& op, const Buffer& scratch);
Buffer scratch(const Stream& s, const SoftmaxFarForward& op);
Buffer scratch(const Stream& s, const SoftmaxFarBackward& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const SoftmaxFarForward& op, const AttentionScratch& scratch);
void run(Cuda, Stream& s, const SoftmaxFarBackward& op, const AttentionScratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
