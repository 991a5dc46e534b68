#include "layers/linear.h"

#include "ops/linear.h"

namespace sbtrain {
namespace {

int64_t or_else(int64_t stored, int64_t logical) {
  return stored > 0 ? stored : logical;
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

void Linear::forward(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
                     Tensor residual_TN) const {
  ops::run(s, ops::Linear{.y_TN = y_TN,
                          .x_TK = x_TK,
                          .w_NK = weight(w),
                          .alpha = spec_.alpha,
                          .residual = residual_TN});
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
  ops::run(s, ops::LinearBackward{.dx_TK = dx_TK,
                                  .dw_NK = weight(dw),
                                  .dy_TN = dy_TN,
                                  .x_TK = x_TK,
                                  .w_NK = weight(w),
                                  .alpha = spec_.alpha,
                                  .accumulate_dx = accumulate,
                                  .accumulate_dw = !dw.fresh(spec_.parts.front().weight)});
}

}  // namespace sbtrain
