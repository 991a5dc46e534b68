#include "layers/linear.h"

#include "core/precision.h"
#include "ops/fp8.h"
#include "ops/linear.h"

namespace sbtrain {
namespace {

int64_t or_else(int64_t stored, int64_t logical) {
  return stored > 0 ? stored : logical;
}

LinearTypes linear_types(const Stream& s) {
  return precision_policy(s.precision(), s.memory().compute_dtype()).linear;
}

enum class Layout : uint8_t { kRows, kColumns, kBoth };

// x_RC in fp8, and its transpose, with one scale for both.
struct InFp8 {
  Buffer x_RC, x_CR, inverse_scale_1;
  ops::Fp8Matrix rows() const { return {x_RC, inverse_scale_1}; }
  ops::Fp8Matrix rows(int64_t first, int64_t count) const {
    return {x_RC.tensor().row_range(first, count), inverse_scale_1};
  }
  ops::Fp8Matrix columns() const { return {x_CR, inverse_scale_1}; }
};

InFp8 to_fp8(Stream& s, Tensor x_RC, DType dtype, Layout layout) {
  const int64_t R = x_RC.rows(), C = x_RC.cols();
  InFp8 y;
  if (layout != Layout::kColumns) y.x_RC = s.scratch("fp8", dtype, {R, C});
  if (layout != Layout::kRows) y.x_CR = s.scratch("fp8 transposed", dtype, {C, R});
  y.inverse_scale_1 = s.scratch("inverse scale", DType::kF32, {1});
  const Buffer amax_1 = s.scratch("amax", DType::kF32, {1});
  ops::run(s, ops::Amax{.amax_1 = amax_1, .x_RC = x_RC});
  ops::run(s, ops::CastFp8{.y_RC = y.x_RC,
                           .y_CR = y.x_CR,
                           .inverse_scale_1 = y.inverse_scale_1,
                           .x_RC = x_RC,
                           .amax_1 = amax_1});
  return y;
}

}  // namespace

int64_t Linear::outputs() const {
  int64_t rows = 0;
  for (const LinearSpec::Part& part : spec_.parts) rows += or_else(part.stored_rows, part.rows);
  return rows;
}

void Linear::add_parameters(std::vector<TensorSpec>& specs) const {
  const int64_t stored_cols = or_else(spec_.stored_cols, spec_.cols);
  bool first = true;
  for (const LinearSpec::Part& part : spec_.parts) {
    specs.push_back({.name = part.weight,
                     .shape = {part.rows, spec_.cols},
                     .storage = {or_else(part.stored_rows, part.rows), stored_cols},
                     .init = spec_.init,
                     .decay = true,
                     .fused = !first,
                     .one_product = true,
                     .role = spec_.role,
                     .heads = part.heads,
                     .groups = part.groups});
    first = false;
  }
  if (!has_bias()) return;
  first = true;
  for (const LinearSpec::Part& part : spec_.parts) {
    specs.push_back({.name = part.bias,
                     .shape = {part.rows},
                     .storage = {or_else(part.stored_rows, part.rows)},
                     .init = spec_.bias_init,
                     .fused = !first});
    first = false;
  }
}

std::vector<TensorSpec> Linear::parameters() const {
  std::vector<TensorSpec> specs;
  add_parameters(specs);
  return specs;
}

// Which products are made in fp8: those of the matrices of blocks, where the policy says so and
// tensor cores take the shape. `first_rows` of the outputs are a product of their own.
bool Linear::in_fp8(const Stream& s, int64_t tokens, int64_t first_rows) const {
  const int64_t K = or_else(spec_.stored_cols, spec_.cols);
  const auto fits = [](int64_t size) { return size % ops::kFp8Multiple == 0; };
  return linear_types(s).fp8() && spec_.role == ParamRole::kLinear && tokens > 0 && fits(tokens) &&
         fits(outputs()) && fits(K) && fits(first_rows);
}

void Linear::multiply(Stream& s, Tensor y_TN, Tensor x_TK, Tensor w_NK, Tensor residual_TN,
                      std::initializer_list<Range> ranges) const {
  const auto of = [&](const Range& range) {
    return range.rows == outputs() ? y_TN : y_TN.col_range(range.first, range.rows);
  };
  if (!in_fp8(s, x_TK.rows(), ranges.size() > 1 ? ranges.begin()->rows : 0)) {
    for (const Range& range : ranges) {
      ops::run(s, ops::Linear{.y_TN = of(range),
                              .x_TK = x_TK,
                              .w_NK = w_NK.row_range(range.first, range.rows),
                              .alpha = range.factor,
                              .residual = residual_TN});
    }
    return;
  }
  const LinearTypes types = linear_types(s);
  const InFp8 x = to_fp8(s, x_TK, types.inputs, Layout::kRows);
  const InFp8 weights = to_fp8(s, w_NK, types.weights, Layout::kRows);
  for (const Range& range : ranges) {
    ops::run(s, ops::Fp8Product{.y_MN = of(range),
                                .a_MK = x.rows(),
                                .b_NK = weights.rows(range.first, range.rows),
                                .alpha = range.factor,
                                .residual = residual_TN});
  }
}

void Linear::forward_scaled(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w, int64_t rows,
                            float factor) const {
  multiply(s, y_TN, x_TK, weight(w), {},
           {{0, rows, factor}, {rows, outputs() - rows, spec_.alpha}});
}

void Linear::forward(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
                     Tensor residual_TN) const {
  multiply(s, y_TN, x_TK, weight(w), residual_TN, {{0, outputs(), spec_.alpha}});
  if (has_bias() && spec_.adds_bias) ops::run(s, ops::AddBias{.y_TN = y_TN, .b_N = bias(w)});
}

void Linear::decode(Stream& s, Tensor y_BN, Tensor x_BK, const Weights& w,
                    const Around& around) const {
  ops::run(s, ops::DecodeLinear{.y_BN = y_BN,
                                .x_BK = x_BK,
                                .w_NK = weight(w),
                                .alpha = spec_.alpha,
                                .norm_K = around.norm.w_D,
                                .norm_eps = around.norm.eps,
                                .swiglu = around.swiglu});
  if (has_bias() && spec_.adds_bias) ops::run(s, ops::AddBias{.y_TN = y_BN, .b_N = bias(w)});
}

void Linear::backward(Stream& s, Tensor dx_TK, const Weights& dw, Tensor dy_TN, Tensor x_TK,
                      const Weights& w, bool accumulate) const {
  if (has_bias()) ops::run(s, ops::BiasBackward{.db_N = bias(dw), .dy_TN = dy_TN});
  const bool accumulate_dw = !dw.fresh(spec_.parts.front().weight);
  if (in_fp8(s, dy_TN.rows())) {
    return multiply_gradients_in_fp8(s, dx_TK, weight(dw), dy_TN, x_TK, weight(w), accumulate,
                                     accumulate_dw);
  }
  ops::run(s, ops::LinearBackward{.dx_TK = dx_TK,
                                  .dw_NK = weight(dw),
                                  .dy_TN = dy_TN,
                                  .x_TK = x_TK,
                                  .w_NK = weight(w),
                                  .alpha = spec_.alpha,
                                  .accumulate_dx = accumulate,
                                  .accumulate_dw = accumulate_dw});
}

// The products' sums run over outputs for dx and over tokens for dw, so that these have to be the
// contiguous dimension. dx may lie where dy or x do: both are read before it is written.
void Linear::multiply_gradients_in_fp8(Stream& s, Tensor dx_TK, Tensor dw_NK, Tensor dy_TN,
                                       Tensor x_TK, Tensor w_NK, bool accumulate_dx,
                                       bool accumulate_dw) const {
  const LinearTypes types = linear_types(s);
  const InFp8 dy =
      to_fp8(s, dy_TN, types.gradients, dx_TK.defined() ? Layout::kBoth : Layout::kColumns);
  {
    const InFp8 x = to_fp8(s, x_TK, types.inputs, Layout::kColumns);
    ops::run(s, ops::Fp8Product{.y_MN = dw_NK,
                                .a_MK = dy.columns(),
                                .b_NK = x.columns(),
                                .alpha = spec_.alpha,
                                .residual = accumulate_dw ? dw_NK : Tensor(),
                                .fast_accumulation = false});
  }
  if (!dx_TK.defined()) return;
  const InFp8 weights = to_fp8(s, w_NK, types.weights, Layout::kColumns);
  ops::run(s, ops::Fp8Product{.y_MN = dx_TK,
                              .a_MK = dy.rows(),
                              .b_NK = weights.columns(),
                              .alpha = spec_.alpha,
                              .residual = accumulate_dx ? dx_TK : Tensor()});
}

}  // namespace sbtrain
