// The transforms that make collinear constrained attention (CoCA, arXiv 2309.08646) plain softmax
// attention. R_j rotates by position j as Rope does; halves of a head are a pair (x1, x2).
//   t' = ReLU((t1 + t2) / 2)
//   official: logit = scale sum_d q_d (R_j q)_d (R_i (t', t'))_d, what the authors' code computes
//   strict:   logit = scale sum_d |q|^2_d t'_d cos((j - i) theta_d), |q|^2 = q1^2 + q2^2: equations
//             8 and 12
// Either is (query)_j . (key)_i of
//   official: query = q * R_j q,        key = R_i (t', t')
//   strict:   query = R_j (|q|^2, 0),   key = R_i (t', 0)
// All tensors are [T, H*d] and may have strided rows. An output may be one of the inputs.
#pragma once

#include "kernels/coca.h"
#include "ops/rope.h"

namespace sbtrain::ops {

enum class CocaVariant : uint8_t { kOfficial, kStrict };
struct CocaParams {
  RopeParams rope{};  // never inverse, and of whole heads
  CocaVariant variant = CocaVariant::kOfficial;
};

// The checks that the four transforms share: y and dy have the shape of x.
inline void check_coca(std::string_view op, const Tensor& y, const Tensor& dy, const Tensor& x,
                       const Tensor& positions_T, const CocaParams& params,
                       const Tensor& lengths_T = {}) {
  const Check c(op);
  check_rotation(c, x, positions_T, params.rope, lengths_T);
  c.that(!params.rope.inverse && params.rope.rotated == 0,
         "the rotation must be of whole heads and not inverse");
  c.same("y_THd", y, x);
  c.same("dy_THd", dy, x);
}

inline void check_coca_limits(std::string_view op, const Tensor& x_THd, const CocaParams& params) {
  check_rope_head_dim(op, x_THd.cols() / params.rope.heads);
}
inline kernels::Coca coca_parameters(kernels::CocaTransform transform, const Tensor& y_THd,
                                     const Tensor& x_THd, const Tensor& dy_THd,
                                     const Tensor& positions_T, const CocaParams& params,
                                     const Tensor& lengths_T = {}) {
  return {rotation_parameters(y_THd, positions_T, params.rope, lengths_T), x_THd, dy_THd, transform,
          params.variant == CocaVariant::kStrict};
}

// y = query.
struct CocaQuery {
  static constexpr std::string_view kName = "coca_query";
  Tensor y_THd;
  Tensor q_THd, positions_T;
  CocaParams params;
  Tensor lengths_T = {};  // as in Rope
  void check() const { check_coca(kName, y_THd, y_THd, q_THd, positions_T, params, lengths_T); }
  void check_limits(const Target&) const { check_coca_limits(kName, q_THd, params); }
  kernels::Coca kernel() const {
    return coca_parameters(kernels::CocaTransform::kQuery, y_THd, q_THd, {}, positions_T, params,
                           lengths_T);
  }
};
struct CocaQueryBackward {
  static constexpr std::string_view kName = "coca_query_backward";
  Tensor dq_THd;  // =
  Tensor dy_THd, q_THd, positions_T;
  CocaParams params;
  void check() const { check_coca(kName, dq_THd, dy_THd, q_THd, positions_T, params); }
  void check_limits(const Target&) const { check_coca_limits(kName, q_THd, params); }
  kernels::Coca kernel() const {
    return coca_parameters(kernels::CocaTransform::kQueryBackward, dq_THd, q_THd, dy_THd,
                           positions_T, params);
  }
};

// y = key.
struct CocaKey {
  static constexpr std::string_view kName = "coca_key";
  Tensor y_THd;
  Tensor t_THd, positions_T;
  CocaParams params;
  Tensor lengths_T = {};  // as in Rope
  void check() const { check_coca(kName, y_THd, y_THd, t_THd, positions_T, params, lengths_T); }
  void check_limits(const Target&) const { check_coca_limits(kName, t_THd, params); }
  kernels::Coca kernel() const {
    return coca_parameters(kernels::CocaTransform::kKey, y_THd, t_THd, {}, positions_T, params,
                           lengths_T);
  }
};
// Reads the key y itself: where the ReLU gives 0, both halves of y are 0.
struct CocaKeyBackward {
  static constexpr std::string_view kName = "coca_key_backward";
  Tensor dt_THd;  // =
  Tensor dy_THd, y_THd, positions_T;
  CocaParams params;
  void check() const { check_coca(kName, dt_THd, dy_THd, y_THd, positions_T, params); }
  void check_limits(const Target&) const { check_coca_limits(kName, y_THd, params); }
  kernels::Coca kernel() const {
    return coca_parameters(kernels::CocaTransform::kKeyBackward, dt_THd, y_THd, dy_THd, positions_T,
                           params);
  }
};

namespace cpu {
void run(Cpu, Stream& s, const CocaQuery& op);
void run(Cpu, Stream& s, const CocaQueryBackward& op);
void run(Cpu, Stream& s, const CocaKey& op);
void run(Cpu, Stream& s, const CocaKeyBackward& op);
}  // namespace cpu

}  // namespace sbtrain::ops
