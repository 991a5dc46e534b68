// Attention to the keys of another rank (ops/far_keys.h): one problem for a backend and the oracle.
#pragma once

#include <string>
#include <vector>

#include "ops/far_softmax.h"
#include "support/tensors.h"
#include "unit/attention/oracle.h"

namespace sbtrain::test {

struct FarCase {
  int64_t tokens, queries, keys;
  int heads = 2, group = 1;
  int64_t head_dim = 16;
  float skip_epsilon = 0.0f;  // stick-breaking
  bool gated = false;         // likewise
  int64_t distance = 0;       // softmax, with the options below
  int64_t window = 0;
  bool alibi = false;
  std::string describe() const {
    std::string text = std::to_string(queries) + " of " + std::to_string(tokens) + " see " +
                       std::to_string(keys) + ", " + std::to_string(heads) + " heads of " +
                       std::to_string(head_dim) + " in groups of " + std::to_string(group);
    if (window > 0) text += ", window " + std::to_string(window);
    if (alibi) text += ", ALiBi";
    if (gated) text += ", gates";
    return skip_epsilon > 0 ? text + ", skip" : text;
  }
};

// What a backend has computed.
struct FarResults {
  std::vector<double> o, log2_rem, dq, dk, dv, w, dgate;
};
struct FarSoftmaxResults {
  std::vector<double> o, lse, dq, dk, dv;
};

// Inputs of a case; sums begin with kBefore.
struct FarAttention {
  static constexpr float kBefore = 0.25f;
  explicit FarAttention(const FarCase& c)
      : config(c),
        q(random_normal("q", {c.tokens, width()})),
        k(random_normal("k", {c.tokens, width() / c.group})),
        v(random_normal("v", {c.tokens, width() / c.group})),
        dout(random_normal("do", {c.tokens, width()})),
        // Of a tile of 64 queries nothing is left that counts.
        before(generated({c.heads, c.tokens}, 0,
                         [&](int64_t i) {
                           const Philox random(1, RandomPurpose::kTest, "before");
                           const bool used_up = i % c.tokens / 64 == 1;
                           return used_up ? -60.0 : -5.0 * random.uniform(static_cast<uint64_t>(i));
                         })),
        w(random_normal("w", {c.heads, c.tokens})),
        // Of which some are 1 and some so small that they close their keys.
        gate(generated({c.tokens, c.heads}, 0,
                       [](int64_t i) {
                         const Philox random(1, RandomPurpose::kTest, "gate");
                         const double u = random.normal(static_cast<uint64_t>(i));
                         return u > 1 ? 1.0 : u < -1.5 ? 1e-4 : 1.0 / (1.0 + std::exp(-2 * u));
                       })),
        o(random_normal("o", {c.tokens, width()})),
        lse(random_normal("lse", {c.heads, c.tokens}, 1.0, 4.0)) {}

  int64_t width() const { return config.heads * config.head_dim; }
  // Those of the keys, or what ops take for none.
  Tensor gates(const Tensor& x_TH) const { return config.gated ? x_TH : Tensor(); }
  ops::FarKeys far() const { return {.queries = config.queries, .keys = config.keys}; }
  ops::StickBreakingParams params() const {
    return {.heads = config.heads, .scale = scale(), .skip_epsilon = config.skip_epsilon};
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(config.head_dim)); }

  ops::SoftmaxParams softmax_params() const {
    return {.heads = config.heads, .scale = scale(), .window = config.window};
  }
  ops::SoftmaxBias softmax_bias() const {
    return {.kind = config.alibi ? ops::PositionBias::kAlibi : ops::PositionBias::kNone};
  }
  oracle::Problem problem() const {
    oracle::Problem p;
    p.tokens = config.tokens;
    p.heads = config.heads;
    p.group = config.group;
    p.head_dim = config.head_dim;
    p.scale = static_cast<double>(scale());
    p.q = to_f64(q);
    p.k = to_f64(k);
    p.v = to_f64(v);
    p.dout = to_f64(dout);
    if (config.gated) p.gate = to_f64(gate);
    p.window = config.window;
    for (int h = 0; config.alibi && h < config.heads; ++h) {
      p.slopes.push_back(static_cast<double>(ops::alibi_slope(config.heads, h)));
    }
    return p;
  }
  static std::vector<double> added(std::vector<double> x) {
    for (double& value : x) value -= static_cast<double>(kBefore);
    return x;
  }
  void check(const FarSoftmaxResults& seen, double output_error, double gradient_error) const {
    const oracle::FarKeys far{
        .queries = config.queries, .keys = config.keys, .before = {}, .w = {}};
    std::vector<double> wanted_o = to_f64(o), wanted_lse = to_f64(lse);
    const oracle::Result want =
        oracle::far_softmax(problem(), far, config.distance, wanted_o, wanted_lse);
    EXPECT_LE(relative_error(seen.o, wanted_o), output_error);
    EXPECT_LE(relative_error(seen.lse, wanted_lse), 1e-5);
    EXPECT_LE(relative_error(added(seen.dq), want.dq), gradient_error);
    EXPECT_LE(relative_error(added(seen.dk), want.dk), gradient_error);
    EXPECT_LE(relative_error(added(seen.dv), want.dv), gradient_error);
  }

  // Compares what the op has added, written and left alone with the oracle.
  void check(const FarResults& seen, double output_error, double gradient_error) const {
    oracle::FarKeys far{
        .queries = config.queries, .keys = config.keys, .before = to_f64(before), .w = to_f64(w)};
    const oracle::Result want = oracle::far_stickbreaking(problem(), far);
    EXPECT_LE(relative_error(added(seen.o), want.o), output_error);
    EXPECT_LE(relative_error(added(seen.dq), want.dq), gradient_error);
    EXPECT_LE(relative_error(added(seen.dk), want.dk), gradient_error);
    EXPECT_LE(relative_error(added(seen.dv), want.dv), gradient_error);
    if (config.gated) {
      EXPECT_LE(relative_error(added(seen.dgate), want.dgate), gradient_error);
    }
    // W counts as much as the stick that it is the gradient of.
    std::vector<double> ws, wanted_ws;
    for (size_t i = 0; i < want.row.size(); ++i) {
      if (static_cast<int64_t>(i) % config.tokens >= config.queries) continue;
      EXPECT_NEAR(std::exp2(seen.log2_rem[i]), want.row[i], 1e-7 + output_error * want.row[i]) << i;
      const double stick = std::exp2(static_cast<double>(before.f32()[i]));
      ws.push_back(stick * seen.w[i]);
      wanted_ws.push_back(stick * far.w[i]);
    }
    EXPECT_LE(relative_error(ws, wanted_ws), gradient_error);
  }

  const FarCase config;
  Owned q, k, v, dout, before, w, gate;
  Owned o, lse;  // softmax: of other keys
};

// What is left after all keys, and who receives it: one problem for a backend and sums in fp64.
struct RemainderCase {
  int64_t tokens;
  int heads = 2, group = 1;
  int64_t head_dim = 16;
  ops::Remainder remainder = ops::Remainder::kValue;
  std::string describe() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads of " +
           std::to_string(head_dim) + " in groups of " + std::to_string(group) +
           (remainder == ops::Remainder::kBias ? ", vectors" : ", values");
  }
};
struct RemainderResults {
  std::vector<double> o, w, dreceiver;
};
struct RemainderOfAll {
  static constexpr float kBefore = 0.25f;  // what sums begin with
  explicit RemainderOfAll(const RemainderCase& c)
      : config(c),
        log2_rem(generated({c.heads, c.tokens}, 0,
                           [](int64_t i) {
                             const Philox random(1, RandomPurpose::kTest, "log2_rem");
                             return -5.0 * random.uniform(static_cast<uint64_t>(i));
                           })),
        dout(random_normal("do", {c.tokens, width()})),
        v(random_normal("v", {c.tokens, width() / c.group})),
        bias(random_normal("r", {1, width()})) {}
  int64_t width() const { return config.heads * config.head_dim; }
  bool to_vector() const { return config.remainder == ops::Remainder::kBias; }
  ops::StickBreakingParams params() const {
    return {.heads = config.heads, .remainder = config.remainder};
  }
  // The shape of the receiver's gradient.
  std::vector<int64_t> receiver() const {
    if (to_vector()) return {1, width()};
    return {config.tokens, width() / config.group};
  }
  void check(const RemainderResults& seen, double error) const {
    const int64_t d = config.head_dim;
    const std::vector<double> rem = to_f64(log2_rem), gradient = to_f64(dout);
    const std::vector<double> values = to_f64(v), vectors = to_f64(bias);
    std::vector<double> o(gradient.size(), double{kBefore}), w(rem.size());
    std::vector<double> dreceiver((to_vector() ? vectors : values).size(), double{kBefore});
    for (int64_t j = 0; j < config.tokens; ++j) {
      for (int64_t h = 0; h < config.heads; ++h) {
        const double left = std::exp2(rem[h * config.tokens + j]);
        for (int64_t c = 0; c < d; ++c) {
          const int64_t at = j * width() + h * d + c;
          const int64_t to =
              to_vector() ? h * d + c : j * (width() / config.group) + h / config.group * d + c;
          const double x = (to_vector() ? vectors : values)[to];
          o[at] += left * x;
          w[h * config.tokens + j] += gradient[at] * x;
          dreceiver[to] += left * gradient[at];
        }
      }
    }
    EXPECT_LE(relative_error(seen.o, o), error);
    EXPECT_LE(relative_error(seen.w, w), error);
    EXPECT_LE(relative_error(seen.dreceiver, dreceiver), error);
  }

  const RemainderCase config;
  Owned log2_rem, dout, v, bias;
};
inline std::vector<RemainderCase> remainder_cases(int64_t head_dim) {
  std::vector<RemainderCase> cases;
  for (RemainderCase c : {RemainderCase{1}, RemainderCase{300}, RemainderCase{77, 6, 3}}) {
    c.head_dim = head_dim;
    for (const auto to : {ops::Remainder::kValue, ops::Remainder::kBias}) {
      c.remainder = to;
      cases.push_back(c);
    }
  }
  return cases;
}

// Few and many queries and keys, heads alone and in groups, of `head_dim` channels.
inline std::vector<FarCase> far_cases(int64_t head_dim) {
  std::vector<FarCase> cases;
  for (FarCase c : {FarCase{256, 256, 256}, FarCase{200, 200, 129}, FarCase{300, 130, 300},
                    FarCase{192, 1, 192}, FarCase{320, 320, 1}, FarCase{449, 70, 40},
                    FarCase{512, 512, 512, 4, 2}, FarCase{200, 190, 77, 3, 3}}) {
    c.head_dim = head_dim;
    for (const float epsilon : {0.0f, 0x1p-24f}) {
      c.skip_epsilon = epsilon;
      cases.push_back(c);
    }
  }
  return cases;
}
inline std::vector<FarCase> gated_far_cases(int64_t head_dim) {
  std::vector<FarCase> cases = far_cases(head_dim);
  for (FarCase& c : cases) c.gated = true;
  return cases;
}

// The same with the options of softmax attention; the keys lie on the rank before, or further away.
inline std::vector<FarCase> far_softmax_cases(int64_t head_dim) {
  std::vector<FarCase> cases;
  for (FarCase c : far_cases(head_dim)) {
    if (c.skip_epsilon > 0) continue;
    for (const bool alibi : {false, true}) {
      for (const int64_t window : {int64_t{0}, c.tokens / 2 + 7, 3 * c.tokens}) {
        c.alibi = alibi;
        c.window = window;
        c.distance = window > c.tokens ? 2 * c.tokens : c.tokens;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

}  // namespace sbtrain::test
