// The transforms of CoCA against its formulas in fp64, gradients included.
#include "ops/coca.h"

#include <gtest/gtest.h>

#include "support/tensors.h"

namespace sbtrain::test {
namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kDim = 6;
constexpr int64_t kWidth = kHeads * kDim;
constexpr double kBase = 100;

double theta(int64_t pair) {
  return std::pow(kBase, -2.0 * static_cast<double>(pair) / kDim);
}

struct Tokens {
  std::vector<double> x;           // [T, H*d]
  std::vector<int32_t> positions;  // [T]
  double at(int64_t t, int64_t h, int64_t c) const {
    return x[static_cast<size_t>(t * kWidth + h * kDim + c)];
  }
  // Component c of the head, rotated by its position.
  double rotated(int64_t t, int64_t h, int64_t c, const std::function<double(int64_t)>& v) const {
    const int64_t half = kDim / 2;
    const double angle = positions[static_cast<size_t>(t)] * theta(c % half);
    return c < half ? v(c) * std::cos(angle) - v(c + half) * std::sin(angle)
                    : v(c) * std::cos(angle) + v(c - half) * std::sin(angle);
  }
  double bar(int64_t t, int64_t h, int64_t pair) const {
    return std::max(0.0, (at(t, h, pair) + at(t, h, pair + kDim / 2)) / 2);
  }
};

// The logit of one pair of tokens by the definitions.
double logit(bool strict, const Tokens& q, int64_t j, const Tokens& t, int64_t i, int64_t h) {
  const int64_t half = kDim / 2;
  double sum = 0;
  if (strict) {
    for (int64_t d = 0; d < half; ++d) {
      const double a = q.at(j, h, d);
      const double b = q.at(j, h, d + half);
      const double angle = (q.positions[j] - t.positions[i]) * theta(d);
      sum += (a * a + b * b) * t.bar(i, h, d) * std::cos(angle);
    }
    return sum;
  }
  for (int64_t d = 0; d < kDim; ++d) {
    const double q_r = q.rotated(j, h, d, [&](int64_t c) { return q.at(j, h, c); });
    const double t_r = t.rotated(i, h, d, [&](int64_t c) { return t.bar(i, h, c % half); });
    sum += q.at(j, h, d) * q_r * t_r;
  }
  return sum;
}

struct Fixture {
  explicit Fixture(bool strict)
      : params{.rope = {.heads = kHeads, .frequencies = ops::rope_frequencies(kBase, kDim)},
               .variant = strict ? ops::CocaVariant::kStrict : ops::CocaVariant::kOfficial} {}
  CpuStream s;
  Owned positions = integers({0, 1, 2, 0, 7, 300});
  Owned q = random_normal("q", {6, kWidth}, 1.0, 0.0, 3);
  Owned t = random_normal("t", {6, kWidth}, 1.0, 0.0, 2);
  ops::CocaParams params;
  Tokens tokens(const Owned& x) const {
    Tokens out{to_f64(x), {}};
    for (const double p : to_f64(positions)) out.positions.push_back(static_cast<int32_t>(p));
    return out;
  }
};

TEST(Coca, LogitsAreThoseOfTheDefinition) {
  for (const bool strict : {false, true}) {
    Fixture f(strict);
    const Owned query = poisoned({6, kWidth}, 1);
    const Owned key = poisoned({6, kWidth});
    ops::run(f.s,
             ops::CocaQuery{
                 .y_THd = query, .q_THd = f.q, .positions_T = f.positions, .params = f.params});
    ops::run(f.s, ops::CocaKey{
                      .y_THd = key, .t_THd = f.t, .positions_T = f.positions, .params = f.params});
    const std::vector<double> a = to_f64(query);
    const std::vector<double> b = to_f64(key);
    std::vector<double> actual, expected;
    for (int64_t j = 0; j < 6; ++j) {
      for (int64_t i = 0; i < 6; ++i) {
        for (int64_t h = 0; h < kHeads; ++h) {
          double sum = 0;
          for (int64_t c = 0; c < kDim; ++c) {
            sum += a[j * kWidth + h * kDim + c] * b[i * kWidth + h * kDim + c];
          }
          actual.push_back(sum);
          expected.push_back(logit(strict, f.tokens(f.q), j, f.tokens(f.t), i, h));
        }
      }
    }
    EXPECT_LT(relative_error(actual, expected), 1e-6) << (strict ? "strict" : "official");
    EXPECT_TRUE(query.gaps_intact());
  }
}

// The strict form depends only on the distance; the official form does not.
TEST(Coca, StrictIsRelative) {
  for (const bool strict : {false, true}) {
    Fixture f(strict);
    Tokens q = f.tokens(f.q);
    Tokens t = f.tokens(f.t);
    const double before = logit(strict, q, 2, t, 1, 0);
    q.positions[2] += 40;
    t.positions[1] += 40;
    const double difference = std::abs(logit(strict, q, 2, t, 1, 0) - before);
    EXPECT_EQ(difference < 1e-9, strict);
  }
}

TEST(Coca, GradientsAreDerivativesOfTheLogits) {
  for (const bool strict : {false, true}) {
    Fixture f(strict);
    const Owned query = poisoned({6, kWidth});
    const Owned key = poisoned({6, kWidth});
    ops::run(f.s,
             ops::CocaQuery{
                 .y_THd = query, .q_THd = f.q, .positions_T = f.positions, .params = f.params});
    ops::run(f.s, ops::CocaKey{
                      .y_THd = key, .t_THd = f.t, .positions_T = f.positions, .params = f.params});
    // The objective is the sum of logits of token n with token n: dquery = key, dkey = query.
    const Owned dq = poisoned({6, kWidth}, 2);
    const Owned dt = poisoned({6, kWidth});
    ops::run(f.s, ops::CocaQueryBackward{.dq_THd = dq,
                                         .dy_THd = key,
                                         .q_THd = f.q,
                                         .positions_T = f.positions,
                                         .params = f.params});
    ops::run(f.s, ops::CocaKeyBackward{.dt_THd = dt,
                                       .dy_THd = query,
                                       .y_THd = key,
                                       .positions_T = f.positions,
                                       .params = f.params});
    const auto objective = [&](const Tokens& q, const Tokens& t) {
      double sum = 0;
      for (int64_t n = 0; n < 6; ++n) {
        for (int64_t h = 0; h < kHeads; ++h) sum += logit(strict, q, n, t, n, h);
      }
      return sum;
    };
    const Tokens q = f.tokens(f.q);
    const Tokens t = f.tokens(f.t);
    const auto of_q = [&](const std::vector<double>& x) { return objective({x, q.positions}, t); };
    const auto of_t = [&](const std::vector<double>& x) { return objective(q, {x, t.positions}); };
    EXPECT_LT(relative_error(dq, numeric_gradient(of_q, q.x)), 1e-6);
    EXPECT_LT(relative_error(dt, numeric_gradient(of_t, t.x)), 1e-6);

    // In place, as the module calls them.
    ops::run(f.s, ops::CocaQueryBackward{.dq_THd = key,
                                         .dy_THd = key,
                                         .q_THd = f.q,
                                         .positions_T = f.positions,
                                         .params = f.params});
    EXPECT_TRUE(bitwise_equal(key, dq));
    ops::run(f.s, ops::CocaQuery{
                      .y_THd = f.q, .q_THd = f.q, .positions_T = f.positions, .params = f.params});
    EXPECT_TRUE(bitwise_equal(f.q, query));
  }
}

}  // namespace
}  // namespace sbtrain::test
