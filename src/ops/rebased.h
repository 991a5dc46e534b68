// Attention whose weights are a quadratic polynomial of the dot product, so that sums over keys are
// a state of fixed size: Based (arXiv 2402.18668) and ReBased (arXiv 2402.10644).
//   x_ij = scale q_j.k_i   s_ij = constant + linear x_ij + square x_ij^2, i <= j, same document
//   den_j = sum_i s_ij + eps   o_j = sum_i s_ij v_i / den_j
// q and k are [T, H*f], v and o [T, H*e]; q, k and v may be column ranges of one matrix.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops {

struct RebasedParams {
  int heads = 0;
  float scale = 1.0f;
  float constant = 0.0f, linear = 0.0f, square = 1.0f;
  float eps = 1e-12f;
  // Over all pairs of tokens instead of chunk by chunk with a state: the same function, faster for
  // documents of a few hundred tokens.
  bool quadratic = false;
};

struct RebasedForward {
  Tensor o_THe;
  Tensor den_HT;  // f32
  Tensor q_THf, k_THf, v_THe;
};
struct RebasedBackward {
  Tensor dq_THf, dk_THf, dv_THe;  // =
  Tensor do_THe, o_THe, den_HT;
  Tensor q_THf, k_THf, v_THe;
};
void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& sequences,
                     const RebasedParams& params);
// Memory of both: O(f^2 e) for each thread, whatever the length. Deterministic.
void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& sequences,
                      const RebasedParams& params);

// Rows of the state of one head: the products k_a k_b, a <= b, and 1 and k where the polynomial has
// those terms. A state is [H * rows, e + 1], f32: sums of row times [v | 1].
int64_t rebased_state_rows(int64_t features, const RebasedParams& params);
// state = that of the tokens of one sequence.
void rebased_state(Stream& s, Tensor state_Re, Tensor k_THf, Tensor v_THe,
                   const RebasedParams& params);
// One new token for each of B sequences: its key and value are added to the state [B, H * rows,
// e + 1] first. At position 0 the state is started anew.
struct RebasedDecode {
  Tensor o_BHe;
  Tensor q_BHf, k_BHf, v_BHe;
  Tensor state_BRe;
  Tensor positions_B;
};
void rebased_decode(Stream& s, const RebasedDecode& t, const RebasedParams& params);

}  // namespace sbtrain::ops
