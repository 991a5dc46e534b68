// The oracle's gradients are the derivatives of its outputs: finite differences of sum(o * do) and,
// where the remainder has a gradient of its own, sum(rem * drem).
#include "unit/attention/oracle.h"

#include <gtest/gtest.h>

#include "support/tensors.h"

namespace sbtrain::test {
namespace {

using oracle::Problem;
using oracle::Result;

std::vector<double> normal(std::string_view name, int64_t count) {
  const Owned values = random_normal(name, {count});
  return to_f64(values);
}

Problem small_problem() {
  Problem p;
  p.tokens = 8;
  p.heads = 2;
  p.head_dim = 3;
  p.bounds = {0, 1, 6, 8};
  p.scale = 0.6;
  p.q = normal("q", 48);
  p.k = normal("k", 48);
  p.v = normal("v", 48);
  p.dout = normal("do", 48);
  return p;
}

// Compares differences in `member` of p with `gradient`.
void expect_derivative(const Problem& p, Result (*attention)(const Problem&),
                       std::vector<double> Problem::*member, const std::vector<double>& gradient,
                       const char* name) {
  const auto objective = [&](const std::vector<double>& x) {
    Problem changed = p;
    changed.*member = x;
    const Result result = attention(changed);
    double sum = 0;
    for (size_t i = 0; i < p.dout.size(); ++i) sum += p.dout[i] * result.o[i];
    for (size_t i = 0; i < p.drem.size(); ++i) sum += p.drem[i] * result.row[i];
    return sum;
  };
  EXPECT_LT(relative_error(gradient, numeric_gradient(objective, p.*member)), 1e-8) << name;
}

void expect_derivatives(const Problem& p, Result (*attention)(const Problem&)) {
  const Result result = attention(p);
  expect_derivative(p, attention, &Problem::q, result.dq, "dq");
  expect_derivative(p, attention, &Problem::k, result.dk, "dk");
  expect_derivative(p, attention, &Problem::v, result.dv, "dv");
  if (!p.gate.empty()) expect_derivative(p, attention, &Problem::gate, result.dgate, "dgate");
  if (!p.bias.empty()) expect_derivative(p, attention, &Problem::bias, result.dbias, "dbias");
  if (!p.fire.empty()) expect_derivative(p, attention, &Problem::fire, result.dfire, "dfire");
}

TEST(Oracle, StickBreakingGradients) {
  for (const bool attend_current : {false, true}) {
    for (const auto remainder :
         {oracle::Remainder::kNone, oracle::Remainder::kValue, oracle::Remainder::kBias}) {
      for (const bool gated : {false, true}) {
        Problem p = small_problem();
        p.attend_current = attend_current;
        p.remainder = remainder;
        if (remainder == oracle::Remainder::kBias) p.bias = normal("bias", 6);
        if (gated) {
          for (const double x : normal("gate", 16)) p.gate.push_back(oracle::sigmoid(x));
        }
        expect_derivatives(p, oracle::stickbreaking);
        p.drem = normal("drem", 16);
        expect_derivatives(p, oracle::stickbreaking);
      }
    }
  }
}

TEST(Oracle, TruncatedStickBreakingGradients) {
  Problem p = small_problem();
  p.remainder = oracle::Remainder::kValue;
  p.first_key.assign(16, 1);
  p.drem = normal("drem", 16);
  expect_derivatives(p, oracle::stickbreaking);
}

TEST(Oracle, SoftmaxGradients) {
  for (const int64_t window : {0, 2}) {
    Problem p = small_problem();
    p.window = window;
    expect_derivatives(p, oracle::softmax);
  }
}

TEST(Oracle, AlibiGradients) {
  Problem p = small_problem();
  p.slopes = {0.25, 0.0625};
  expect_derivatives(p, oracle::softmax);
}

// m is so small that both sides of max(j, |m L0|) occur; c and m have both signs.
TEST(Oracle, FireGradients) {
  for (const double sign : {1.0, -1.0}) {
    Problem p = small_problem();
    p.window = sign > 0 ? 0 : 3;
    p.fire = normal("fire", 2 + 2 * 5 + 2 * 5 + 2);
    p.fire[0] = sign * 0.3;
    p.fire[1] = sign * 0.7;
    p.fire_length = 4;
    expect_derivatives(p, oracle::softmax);
  }
}

// The outputs are known exactly: equal logits z = 0 halve the stick at each key.
TEST(Oracle, HalvesTheStickAtLogitZero) {
  Problem p;
  p.tokens = 4;
  p.bounds = {0, 4};
  p.q = {0, 0, 0, 0};
  p.k = {1, 2, 3, 4};
  p.v = {8, 4, 2, 1};
  const Result result = oracle::stickbreaking(p);
  EXPECT_EQ(result.o, (std::vector<double>{0, 4, 4, 3}));
  EXPECT_EQ(result.row, (std::vector<double>{1, 0.5, 0.25, 0.125}));
}

}  // namespace
}  // namespace sbtrain::test
