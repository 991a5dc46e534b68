#include "attention/rotary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "ops/rope.h"

namespace sbtrain {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

bool is_ntk(RotaryScaling scaling) {
  return scaling == RotaryScaling::kNtk || scaling == RotaryScaling::kDynamicNtk;
}

bool has_train_length(RotaryScaling scaling) {
  return scaling == RotaryScaling::kDynamicNtk || scaling == RotaryScaling::kYarn ||
         scaling == RotaryScaling::kLlama3;
}

ops::DynamicNtk dynamic_ntk(const RotaryOptions& options) {
  return {.base = options.base, .factor = options.factor, .train_length = options.train_length};
}

// `share` of the frequency as it is, the rest of it divided by the factor.
double blend(double frequency, double factor, double share) {
  return frequency * (share + (1.0 - share) / factor);
}

// Equations 17, 18 and 23 of the YaRN paper. The pair that makes `turns` turns over the trained
// length is d ln(L / (2 pi turns)) / (2 ln base); as in the authors' code, the ramp between the two
// bounds runs over whole pairs.
void scale_yarn(std::vector<double>& frequencies, const RotaryOptions& o, double d) {
  const auto pair_of = [&](double turns) {
    const auto length = static_cast<double>(o.train_length);
    return d * std::log(length / (turns * kTwoPi)) / (2.0 * std::log(o.base));
  };
  const double low = std::max(std::floor(pair_of(o.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of(o.beta_slow)), d - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = blend(frequencies[i], o.factor, 1.0 - ramp);
  }
}

// Between the two wavelengths the share of the unscaled frequency falls from 1 to 0.
void scale_llama3(std::vector<double>& frequencies, const RotaryOptions& o) {
  for (double& frequency : frequencies) {
    const double wavelength = kTwoPi / frequency;
    const double turns = static_cast<double>(o.train_length) / wavelength;
    const double share = (turns - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
    frequency = blend(frequency, o.factor, std::clamp(share, 0.0, 1.0));
  }
}

}  // namespace

void describe(Fields& f, RotaryOptions& o) {
  const Rule rope = Rule{}.when("position", {"rope"});
  f.add("rope_base", o.base, above(0).when("position", {"rope"}).with_example(500),
        "Base of the rotary frequencies.");
  f.add("rope_scaling", o.scaling, rope,
        "How rotary positions reach beyond the trained length: slower positions (linear), a "
        "larger base (ntk), a base that grows with the length (dynamic_ntk), or slower low "
        "frequencies (yarn, llama3).");
  f.add("rope_factor", o.factor,
        above(0)
            .when("rope_scaling", {"linear", "ntk", "dynamic_ntk", "yarn", "llama3"})
            .with_example(2.5),
        "linear: positions are divided by it; yarn, llama3: the positions of low frequencies are; "
        "ntk: alpha of base alpha^(d/(d-2)); dynamic_ntk: f of base (f L/L_train - "
        "(f-1))^(d/(d-2)).");
  f.add(
      "rope_train_length", o.train_length,
      between(0, kMaxSize).when("rope_scaling", {"dynamic_ntk", "yarn", "llama3"}).with_example(20),
      "L_train, the sequence length that the model was trained with before the scaling "
      "(transformers: original_max_position_embeddings).");
  const auto yarn = [](const Rule& rule) { return Rule(rule).when("rope_scaling", {"yarn"}); };
  f.add("rope_beta_fast", o.beta_fast, yarn(above(0)),
        "yarn: pairs that turn more often than this over rope_train_length are not scaled.");
  f.add("rope_beta_slow", o.beta_slow, yarn(above(0)),
        "yarn: pairs that turn less often than this over rope_train_length are scaled whole.");
  f.add("rope_attention_factor", o.attention_factor, yarn(at_least(0)).with_example(1.2),
        "yarn: factor of queries and keys; 0: 0.1 ln(rope_factor) + 1.");
  const auto llama3 = [](const Rule& rule) { return Rule(rule).when("rope_scaling", {"llama3"}); };
  f.add("rope_low_freq_factor", o.low_freq_factor, llama3(above(0)),
        "llama3: wavelengths above rope_train_length divided by this are scaled whole.");
  f.add("rope_high_freq_factor", o.high_freq_factor, llama3(above(0)),
        "llama3: wavelengths below rope_train_length divided by this are not scaled.");
}

void describe_rope_fraction(Fields& f, RotaryOptions& o) {
  Rule share = above(0).when("position", {"rope"});
  share.max = 1;
  f.add("rope_fraction", o.fraction, share,
        "The part of the channels of a head, its first ones, that are rotated; the others know no "
        "position.");
}

std::vector<OptionProblem> check(const RotaryOptions& options, const AttentionShape& model) {
  std::vector<OptionProblem> problems;
  const auto problem = [&](const char* key, std::string message) {
    problems.push_back({key, std::move(message)});
  };
  const int64_t head_dim = model.head_width();
  const int64_t d = options.rotated(head_dim);
  const std::string_view name = name_of(options.scaling);
  if (options.fraction != 1.0 && (d == 0 || d % 2 != 0)) {
    problem("rope_fraction",
            fmt::format("rope turns pairs of values, but {:g} of {} channels are {}",
                        options.fraction, head_dim, d));
  } else if (d % 2 != 0) {
    problem("position", fmt::format("rope turns pairs of values, but heads of {} (model.head_dim, "
                                    "or width / heads) have an odd number of them",
                                    d));
  }
  if (options.fraction != 1.0 && options.scaling == RotaryScaling::kYarn) {
    problem("rope_fraction", "yarn scales whole queries and keys, so that it needs 1");
  }
  if (is_ntk(options.scaling) && d < 4) {
    problem("rope_scaling",
            fmt::format("{} needs {} of at least 4, not {}", name,
                        d == head_dim ? "a head_dim" : "rotated channels of a head", d));
  }
  if (!has_train_length(options.scaling)) return problems;
  if (options.train_length < 1) {
    problem("rope_train_length",
            fmt::format("{} needs the length that the model was trained with", name));
  } else if (options.factor < 1) {
    problem("rope_factor",
            fmt::format("{} is below 1: it would shorten what the model reaches", options.factor));
  }
  if (options.scaling == RotaryScaling::kYarn && options.base <= 1) {
    problem("rope_base", fmt::format("yarn needs one above 1, not {}", options.base));
  }
  if (options.scaling == RotaryScaling::kYarn && options.beta_fast < options.beta_slow) {
    problem("rope_beta_fast",
            fmt::format("{} is below rope_beta_slow = {}", options.beta_fast, options.beta_slow));
  }
  if (options.scaling == RotaryScaling::kLlama3 &&
      options.high_freq_factor <= options.low_freq_factor) {
    problem("rope_high_freq_factor",
            fmt::format("{} must be above rope_low_freq_factor = {}", options.high_freq_factor,
                        options.low_freq_factor));
  }
  return problems;
}

std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t rotated,
                                       int64_t length) {
  const auto d = static_cast<double>(rotated);
  const double factor = options.factor;
  double base = options.base;
  if (options.scaling == RotaryScaling::kNtk) base *= std::pow(factor, d / (d - 2));
  if (options.scaling == RotaryScaling::kDynamicNtk) {
    base = dynamic_ntk(options).base_at(length, rotated);
  }
  std::vector<double> frequencies = ops::rope_frequencies(base, rotated);
  if (options.scaling == RotaryScaling::kLinear) {
    for (double& frequency : frequencies) frequency /= factor;
  }
  if (options.scaling == RotaryScaling::kYarn) scale_yarn(frequencies, options, d);
  if (options.scaling == RotaryScaling::kLlama3) scale_llama3(frequencies, options);
  return frequencies;
}

void rotate(HostMatrix& x_THd, const ops::RopeParams& params) {
  const int64_t d = x_THd.cols / params.heads;
  const int64_t half = (params.rotated > 0 ? params.rotated : d) / 2;
  for (int64_t t = 0; t < x_THd.rows; ++t) {
    for (int64_t i = 0; i < x_THd.cols; ++i) {
      if (i % d >= half) continue;
      const double angle = static_cast<double>(t) * params.frequencies[static_cast<size_t>(i % d)];
      double& first = x_THd.row(t)[i];
      double& second = x_THd.row(t)[i + half];
      const double x1 = first;
      const double x2 = second;
      first = x1 * std::cos(angle) - x2 * std::sin(angle);
      second = x2 * std::cos(angle) + x1 * std::sin(angle);
    }
  }
}

Rotary::Rotary(const RotaryOptions& options, const AttentionShape& model)
    : options_(options), head_dim_(model.head_width()), rotated_(options.rotated(head_dim_)) {
  if (options.scaling != RotaryScaling::kDynamicNtk) {
    frequencies_ = rotary_frequencies(options, rotated_, 0);
  }
}

ops::RopeParams Rotary::params(int64_t heads, int64_t length, bool inverse) const {
  const bool dynamic = options_.scaling == RotaryScaling::kDynamicNtk;
  return {.heads = static_cast<int>(heads),
          .frequencies = dynamic ? rotary_frequencies(options_, rotated_, length) : frequencies_,
          .inverse = inverse,
          .rotated = rotated_ == head_dim_ ? 0 : rotated_,
          .dynamic = dynamic ? dynamic_ntk(options_) : ops::DynamicNtk{}};
}

double Rotary::logit_factor() const {
  if (options_.scaling != RotaryScaling::kYarn) return 1.0;
  const double given = options_.attention_factor;
  const double factor = given > 0 ? given : 0.1 * std::log(options_.factor) + 1.0;
  return factor * factor;
}

}  // namespace sbtrain
