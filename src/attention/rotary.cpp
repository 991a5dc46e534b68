#include "attention/rotary.h"

#include <fmt/format.h>

#include <cmath>

#include "ops/rope.h"

namespace sbtrain {
namespace {

bool is_ntk(RotaryScaling scaling) {
  return scaling == RotaryScaling::kNtk || scaling == RotaryScaling::kDynamicNtk;
}

}  // namespace

void describe(Fields& f, RotaryOptions& o) {
  const Rule rope = Rule{}.when("position", {"rope"});
  f.add("rope_base", o.base, above(0).when("position", {"rope"}).with_example(500),
        "Base of the rotary frequencies.");
  f.add("rope_scaling", o.scaling, rope,
        "How rotary positions reach beyond the trained length: slower positions (linear), a "
        "larger base (ntk), or a base that grows with the length (dynamic_ntk).");
  f.add("rope_factor", o.factor,
        above(0).when("rope_scaling", {"linear", "ntk", "dynamic_ntk"}).with_example(2.5),
        "linear: positions are divided by it; ntk: alpha of base alpha^(d/(d-2)); dynamic_ntk: f "
        "of base (f L/L_train - (f-1))^(d/(d-2)).");
  f.add("rope_train_length", o.train_length,
        between(0, kMaxSize).when("rope_scaling", {"dynamic_ntk"}).with_example(20),
        "L_train of dynamic_ntk: the sequence length that the model was trained with.");
}

std::vector<OptionProblem> check(const RotaryOptions& options, const ModelConfig& model) {
  std::vector<OptionProblem> problems;
  const int64_t d = model.head_dim();
  if (d % 2 != 0) {
    problems.push_back(
        {"position",
         fmt::format("rope turns pairs of values, but head_dim = width / heads = {} is odd", d)});
  }
  if (is_ntk(options.scaling) && d < 4) {
    problems.push_back({"rope_scaling", fmt::format("{} needs a head_dim of at least 4, not {}",
                                                    name_of(options.scaling), d)});
  }
  if (options.scaling != RotaryScaling::kDynamicNtk) return problems;
  if (options.train_length < 1) {
    problems.push_back(
        {"rope_train_length", "dynamic_ntk needs the length that the model was trained with"});
  } else if (options.factor < 1) {
    problems.push_back(
        {"rope_factor",
         fmt::format("{} is below 1: the base would shrink with the length", options.factor)});
  }
  return problems;
}

void rotate(HostMatrix& x_THd, const ops::RopeParams& params) {
  const int64_t d = x_THd.cols / params.heads;
  for (int64_t t = 0; t < x_THd.rows; ++t) {
    for (int64_t i = 0; i < x_THd.cols; ++i) {
      if (i % d >= d / 2) continue;
      const double angle = static_cast<double>(t) * static_cast<double>(params.position_scale) *
                           std::pow(static_cast<double>(params.base),
                                    -2.0 * static_cast<double>(i % d) / static_cast<double>(d));
      double& first = x_THd.row(t)[i];
      double& second = x_THd.row(t)[i + d / 2];
      const double x1 = first;
      const double x2 = second;
      first = x1 * std::cos(angle) - x2 * std::sin(angle);
      second = x2 * std::cos(angle) + x1 * std::sin(angle);
    }
  }
}

Rotary::Rotary(const RotaryOptions& options, const ModelConfig& model) : options_(options) {
  const auto d = static_cast<double>(model.head_dim());
  exponent_ = is_ntk(options.scaling) ? d / (d - 2) : 1.0;
}

ops::RopeParams Rotary::params(int64_t heads, int64_t length, bool inverse) const {
  double base = options_.base;
  double position_scale = 1.0;
  const double factor = options_.factor;
  if (options_.scaling == RotaryScaling::kLinear) position_scale = 1.0 / factor;
  if (options_.scaling == RotaryScaling::kNtk) base *= std::pow(factor, exponent_);
  if (options_.scaling == RotaryScaling::kDynamicNtk && length > options_.train_length) {
    const double ratio = static_cast<double>(length) / static_cast<double>(options_.train_length);
    base *= std::pow(factor * ratio - (factor - 1.0), exponent_);
  }
  return {.heads = static_cast<int>(heads),
          .base = static_cast<float>(base),
          .inverse = inverse,
          .position_scale = static_cast<float>(position_scale)};
}

}  // namespace sbtrain
