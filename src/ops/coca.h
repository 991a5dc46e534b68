// The transforms that make collinear constrained attention (CoCA, arXiv 2309.08646) plain softmax
// attention. R_j rotates by position j as ops::rope does; halves of a head are a pair (x1, x2).
//   t' = ReLU((t1 + t2) / 2)
//   official: logit = scale sum_d q_d (R_j q)_d (R_i (t', t'))_d, what the authors' code computes
//   strict:   logit = scale sum_d |q|^2_d t'_d cos((j - i) theta_d), |q|^2 = q1^2 + q2^2: equations
//             8 and 12
// Either is (query)_j . (key)_i of
//   official: query = q * R_j q,        key = R_i (t', t')
//   strict:   query = R_j (|q|^2, 0),   key = R_i (t', 0)
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops {

enum class CocaVariant : uint8_t { kOfficial, kStrict };
struct CocaParams {
  RopeParams rope{};  // never inverse
  CocaVariant variant = CocaVariant::kOfficial;
};

// All tensors are [T, H*d], rows may be strided; outputs may be the inputs.
void coca_query(Stream& s, Tensor y_THd, Tensor q_THd, Tensor positions_T,
                const CocaParams& params);
void coca_query_backward(Stream& s, Tensor dq_THd, Tensor dy_THd, Tensor q_THd, Tensor positions_T,
                         const CocaParams& params);  // =
void coca_key(Stream& s, Tensor y_THd, Tensor t_THd, Tensor positions_T, const CocaParams& params);
// From the key y itself: where the ReLU lets nothing through, both of its halves are 0.
void coca_key_backward(Stream& s, Tensor dt_THd, Tensor dy_THd, Tensor y_THd, Tensor positions_T,
                       const CocaParams& params);  // =

}  // namespace sbtrain::ops
