// Attention whose weights are a quadratic polynomial of the dot product, so that sums over keys are
// a state of fixed size: Based (arXiv 2402.18668) and ReBased (arXiv 2402.10644).
//   x_ij = scale q_j.k_i   s_ij = constant + linear x_ij + square x_ij^2, i <= j, same document
//   den_j = sum_i s_ij + eps   o_j = sum_i s_ij v_i / den_j
// q and k are [T, H*f], v and o [T, H*e]; q, k and v may be column ranges of one matrix.
#pragma once

#include "core/sequences.h"
#include "kernels/attention/rebased.h"
#include "ops/limits.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

struct RebasedParams {
  int heads = 0;
  float scale = 1.0f;
  float constant = 0.0f, linear = 0.0f, square = 1.0f;
  float eps = 1e-12f;
  // Computes all pairs of tokens instead of chunks and a state. This is the same function, and
  // faster for documents of a few hundred tokens.
  bool quadratic = false;
  kernels::RebasedPolynomial polynomial() const { return {scale, constant, linear, square, eps}; }
};

// Rows of the state of one head: the products k_a k_b, a <= b, and 1 and k where the polynomial has
// those terms. A state is [H * rows, e + 1], f32: sums of row times [v | 1].
int64_t rebased_state_rows(int64_t features, const RebasedParams& params);

struct RebasedChoice {
  bool chunked = false;  // keeps the states of all chunks for a group of heads; else all pairs
  int64_t heads = 0;     // in one group
  int64_t state = 0;     // floats of one head
  size_t bytes = 0;      // scratch
};
using RebasedScratch = Planned<RebasedChoice>;

// On the CPU both passes have scratch of O(f^2 e) for each thread, whatever the length; on CUDA it
// holds the states of all chunks for a group of heads (ops/choose.h). Deterministic.
struct RebasedForward {
  static constexpr std::string_view kName = "rebased_forward";
  Tensor o_THe;
  Tensor den_HT;  // f32
  Tensor q_THf, k_THf, v_THe;
  Sequences sequences{};
  RebasedParams params{};
  void check() const;
  void check_limits(const Target&) const { check_rebased_heads(kName, k_THf, v_THe, params.heads); }
  RebasedScratch scratch(const Stream& s) const {
    return plan<RebasedChoice>(s, *this, "rebased states");
  }
};
struct RebasedBackward {
  static constexpr std::string_view kName = "rebased_backward";
  Tensor dq_THf, dk_THf, dv_THe;  // =
  Tensor do_THe, o_THe, den_HT;
  Tensor q_THf, k_THf, v_THe;
  Sequences sequences{};
  RebasedParams params{};
  void check() const;
  void check_limits(const Target&) const { check_rebased_heads(kName, k_THf, v_THe, params.heads); }
  RebasedScratch scratch(const Stream& s) const { return plan<RebasedChoice>(s, *this); }
};

// state = the state after all tokens of one sequence.
struct RebasedState {
  static constexpr std::string_view kName = "rebased_state";
  Tensor state_Re;
  Tensor k_THf, v_THe;
  RebasedParams params;
  void check() const;
  void check_limits(const Target&) const { check_rebased_heads(kName, k_THf, v_THe, params.heads); }
  RebasedScratch scratch(const Stream& s) const {
    return plan<RebasedChoice>(s, *this, "rebased states");
  }
};

// One new token for each of B sequences: its key and value are first added to the state [B, H *
// rows, e + 1], which is cleared before that at position 0.
struct RebasedDecode {
  static constexpr std::string_view kName = "rebased_decode";
  Tensor o_BHe;
  Tensor q_BHf, k_BHf, v_BHe;
  Tensor state_BRe;
  Tensor positions_B;
  RebasedParams params{};
  void check() const;
  void check_limits(const Target&) const { check_rebased_heads(kName, q_BHf, v_BHe, params.heads); }
  kernels::RebasedDecode kernel() const {
    const auto features = static_cast<int>(q_BHf.cols() / params.heads);
    const auto values = static_cast<int>(v_BHe.cols() / params.heads);
    return {o_BHe,        q_BHf,        k_BHf,    v_BHe,  state_BRe,          positions_B,
            q_BHf.rows(), params.heads, features, values, params.polynomial()};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const RebasedForward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const RebasedBackward& op, const Buffer& scratch);
void run(Cpu, Stream& s, const RebasedState& op, const Buffer& scratch);
void run(Cpu, Stream& s, const RebasedDecode& op);

// The same for all three: what either pass takes for each thread.
Buffer scratch(const Stream& s, const RebasedForward& op);
Buffer scratch(const Stream& s, const RebasedBackward& op);
Buffer scratch(const Stream& s, const RebasedState& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const RebasedForward& op, const RebasedScratch& scratch);
void run(Cuda, Stream& s, const RebasedBackward& op, const RebasedScratch& scratch);
void run(Cuda, Stream& s, const RebasedState& op, const RebasedScratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
