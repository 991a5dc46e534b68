#include "layers/linear.h"

#include <algorithm>

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
  ops::Fp8Matrix columns() const { return {x_CR, inverse_scale_1}; }
};

// Casts x_RC into y_RC and its transpose y_CR, where they are defined. Without amax_1 it looks for
// the largest element.
void cast(Stream& s, Tensor y_RC, Tensor y_CR, Tensor inverse_scale_1, Tensor x_RC, Tensor amax_1) {
  Buffer found_1;
  if (!amax_1.defined()) {
    found_1 = s.scratch("amax", DType::kF32, {1});
    amax_1 = found_1;
    ops::run(s, ops::Amax{.amax_1 = amax_1, .x_RC = x_RC});
  }
  ops::run(s, ops::CastFp8{.y_RC = y_RC,
                           .y_CR = y_CR,
                           .inverse_scale_1 = inverse_scale_1,
                           .x_RC = x_RC,
                           .amax_1 = amax_1});
}

InFp8 to_fp8(Stream& s, Tensor x_RC, DType dtype, Layout layout, Tensor amax_1 = {}) {
  const int64_t R = x_RC.rows(), C = x_RC.cols();
  InFp8 y;
  if (layout != Layout::kColumns) y.x_RC = s.scratch("fp8", dtype, {R, C});
  if (layout != Layout::kRows) y.x_CR = s.scratch("fp8 transposed", dtype, {C, R});
  y.inverse_scale_1 = s.scratch("inverse scale", DType::kF32, {1});
  cast(s, y.x_RC, y.x_CR, y.inverse_scale_1, x_RC, amax_1);
  return y;
}

// Casts x_TK into the transpose that backward() takes, and into y_TK, if that is defined.
Fp8Inputs keep(Stream& s, Tensor y_TK, Tensor x_TK, DType dtype, Tensor amax_1) {
  const auto kept = [&](const char* name, DType type, std::initializer_list<int64_t> shape) {
    return s.allocate(MemoryClass::kActivations, name, type, shape);
  };
  Fp8Inputs inputs{.x_KT = kept("inputs transposed", dtype, {x_TK.cols(), x_TK.rows()}),
                   .inverse_scale_1 = kept("inverse scale of inputs", DType::kF32, {1})};
  cast(s, y_TK, inputs.x_KT, inputs.inverse_scale_1, x_TK, amax_1);
  return inputs;
}

// The inputs of a forward product, of which `keeps`, if any, gets the transpose.
InFp8 inputs_to_fp8(Stream& s, Tensor x_TK, DType dtype, Tensor amax_1, Fp8Inputs* keeps) {
  if (keeps == nullptr) return to_fp8(s, x_TK, dtype, Layout::kRows, amax_1);
  InFp8 y;
  y.x_RC = s.scratch("fp8", dtype, {x_TK.rows(), x_TK.cols()});
  *keeps = keep(s, y.x_RC, x_TK, dtype, amax_1);
  return y;
}

// Weights in e4m3, as a product takes them: they are held so, or cast now.
class Fp8Weights {
 public:
  Fp8Weights(Stream& s, Tensor w_NK, const Fp8Scaled* held, DType dtype, Layout layout) {
    if (held == nullptr) {
      cast_ = to_fp8(s, w_NK, dtype, layout);
      w_ = layout == Layout::kRows ? cast_.rows() : cast_.columns();
      return;
    }
    w_ = {layout == Layout::kRows ? w_NK : held->transposed, held->inverse_scale_1};
    if (w_.x.defined()) return;
    cast_.x_CR = s.scratch("fp8 transposed", dtype, {w_NK.cols(), w_NK.rows()});
    ops::run(s, ops::TransposeFp8{.y_CR = cast_.x_CR, .x_RC = w_NK});
    w_.x = cast_.x_CR;
  }
  const ops::Fp8Matrix& matrix() const { return w_; }
  ops::Fp8Matrix row_range(int64_t first, int64_t count) const {
    return {w_.x.row_range(first, count), w_.inverse_scale_1};
  }

 private:
  InFp8 cast_;
  ops::Fp8Matrix w_;
};

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

Linear::Linear(LinearSpec spec) : spec_(std::move(spec)) {
  const std::vector<TensorSpec> specs = parameters();
  takes_fp8_ = std::all_of(specs.begin(), specs.begin() + parts(), takes_fp8);
}

// Which products are made in fp8: those of the matrices of blocks, where the policy says so and
// tensor cores take the shape.
bool Linear::in_fp8(const Stream& s, int64_t tokens) const {
  return linear_types(s).fp8() && takes_fp8_ && tokens > 0 && tokens % kFp8Multiple == 0;
}

Fp8Inputs Linear::keep_inputs(Stream& s, Tensor x_TK, Tensor amax_1) const {
  if (!in_fp8(s, x_TK.rows())) return {};
  return keep(s, {}, x_TK, linear_types(s).inputs, amax_1);
}

void Linear::multiply(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
                      const ForwardOptions& options, std::initializer_list<Range> ranges) const {
  const auto of = [&](const Range& range) {
    return range.rows == outputs() ? y_TN : y_TN.col_range(range.first, range.rows);
  };
  const Tensor w_NK = weight(w);
  if (!in_fp8(s, x_TK.rows())) {
    for (const Range& range : ranges) {
      ops::run(s, ops::Linear{.y_TN = of(range),
                              .x_TK = x_TK,
                              .w_NK = w_NK.row_range(range.first, range.rows),
                              .alpha = range.factor,
                              .residual = options.residual_TN});
    }
    return;
  }
  const LinearTypes types = linear_types(s);
  const InFp8 x = inputs_to_fp8(s, x_TK, types.inputs, options.amax_1, options.keeps);
  const ops::Fp8Matrix inputs{
      x.x_RC, options.keeps ? options.keeps->inverse_scale_1.tensor() : x.inverse_scale_1.tensor()};
  const Fp8Weights weights(s, w_NK, held_in_fp8(w), types.weights, Layout::kRows);
  for (const Range& range : ranges) {
    ops::run(s, ops::Fp8Product{.y_MN = of(range),
                                .a_MK = inputs,
                                .b_NK = weights.row_range(range.first, range.rows),
                                .alpha = range.factor,
                                .residual = options.residual_TN});
  }
}

void Linear::forward_scaled(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w, int64_t rows,
                            float factor, Tensor amax_1) const {
  multiply(s, y_TN, x_TK, w, ForwardOptions{.amax_1 = amax_1},
           {{0, rows, factor}, {rows, outputs() - rows, spec_.alpha}});
}

void Linear::forward(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
                     const ForwardOptions& options) const {
  multiply(s, y_TN, x_TK, w, options, {{0, outputs(), spec_.alpha}});
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
                      const Weights& w, const BackwardOptions& options) const {
  if (has_bias()) ops::run(s, ops::BiasBackward{.db_N = bias(dw), .dy_TN = dy_TN});
  if (in_fp8(s, dy_TN.rows())) {
    return multiply_gradients_in_fp8(s, dx_TK, dw, dy_TN, x_TK, w, options);
  }
  ops::run(s, ops::LinearBackward{.dx_TK = dx_TK,
                                  .dw_NK = weight(dw),
                                  .dy_TN = dy_TN,
                                  .x_TK = x_TK,
                                  .w_NK = weight(w),
                                  .alpha = spec_.alpha,
                                  .accumulate_dx = options.accumulate,
                                  .accumulate_dw = !fresh(dw)});
}

// The products' sums run over outputs for dx and over tokens for dw, so that these have to be the
// contiguous dimension. dx may lie where dy or x do: both are read before it is written.
void Linear::multiply_gradients_in_fp8(Stream& s, Tensor dx_TK, const Weights& dw, Tensor dy_TN,
                                       Tensor x_TK, const Weights& w,
                                       const BackwardOptions& options) const {
  const LinearTypes types = linear_types(s);
  const Tensor dw_NK = weight(dw), w_NK = weight(w);
  const InFp8 dy = to_fp8(s, dy_TN, types.gradients,
                          dx_TK.defined() ? Layout::kBoth : Layout::kColumns, options.dy_amax_1);
  {
    const bool kept = options.kept != nullptr && options.kept->kept();
    InFp8 x;
    if (!kept) x = to_fp8(s, x_TK, types.inputs, Layout::kColumns, options.x_amax_1);
    ops::run(s, ops::Fp8Product{
                    .y_MN = dw_NK,
                    .a_MK = dy.columns(),
                    .b_NK = kept ? ops::Fp8Matrix{options.kept->x_KT, options.kept->inverse_scale_1}
                                 : x.columns(),
                    .alpha = spec_.alpha,
                    .residual = fresh(dw) ? Tensor() : dw_NK,
                    .fast_accumulation = false});
  }
  if (!dx_TK.defined()) return;
  const Fp8Weights weights(s, w_NK, held_in_fp8(w), types.weights, Layout::kColumns);
  ops::run(s, ops::Fp8Product{.y_MN = dx_TK,
                              .a_MK = dy.rows(),
                              .b_NK = weights.matrix(),
                              .alpha = spec_.alpha,
                              .residual = options.accumulate ? dx_TK : Tensor()});
}

}  // namespace sbtrain
