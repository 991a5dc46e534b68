// The transforms of CoCA: checks their tensors, then runs them on the stream's backend.
#include "ops/check_attention.h"
#include "ops/cpu/cpu.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops {
namespace {

void check(std::string_view op, const Tensor& y, const Tensor& x, const Tensor& positions_T,
           const CocaParams& params) {
  const int64_t d = check_heads(op, "x_THd", x, x.rows(), params.rope.heads);
  require(d % 2 == 0 && !params.rope.inverse, "{}: heads of {} values cannot be rotated", op, d);
  check_same_shape(op, "y_THd", y, x);
  check_flat(op, "positions_T", positions_T, DType::kI32, x.rows());
}

}  // namespace

void coca_query(Stream& s, Tensor y_THd, Tensor q_THd, Tensor positions_T,
                const CocaParams& params) {
  check("coca_query", y_THd, q_THd, positions_T, params);
  dispatch(
      s, "coca_query", [&] { cpu::coca_query(s, y_THd, q_THd, positions_T, params); },
      [&] { cuda::coca_query(s, y_THd, q_THd, positions_T, params); });
}

void coca_query_backward(Stream& s, Tensor dq_THd, Tensor dy_THd, Tensor q_THd, Tensor positions_T,
                         const CocaParams& params) {
  constexpr std::string_view kOp = "coca_query_backward";
  check(kOp, dq_THd, q_THd, positions_T, params);
  check_same_shape(kOp, "dy_THd", dy_THd, q_THd);
  dispatch(
      s, kOp, [&] { cpu::coca_query_backward(s, dq_THd, dy_THd, q_THd, positions_T, params); },
      [&] { cuda::coca_query_backward(s, dq_THd, dy_THd, q_THd, positions_T, params); });
}

void coca_key(Stream& s, Tensor y_THd, Tensor t_THd, Tensor positions_T, const CocaParams& params) {
  check("coca_key", y_THd, t_THd, positions_T, params);
  dispatch(
      s, "coca_key", [&] { cpu::coca_key(s, y_THd, t_THd, positions_T, params); },
      [&] { cuda::coca_key(s, y_THd, t_THd, positions_T, params); });
}

void coca_key_backward(Stream& s, Tensor dt_THd, Tensor dy_THd, Tensor y_THd, Tensor positions_T,
                       const CocaParams& params) {
  constexpr std::string_view kOp = "coca_key_backward";
  check(kOp, dt_THd, y_THd, positions_T, params);
  check_same_shape(kOp, "dy_THd", dy_THd, y_THd);
  dispatch(
      s, kOp, [&] { cpu::coca_key_backward(s, dt_THd, dy_THd, y_THd, positions_T, params); },
      [&] { cuda::coca_key_backward(s, dt_THd, dy_THd, y_THd, positions_T, params); });
}

}  // namespace sbtrain::ops
