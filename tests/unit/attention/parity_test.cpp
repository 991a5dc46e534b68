// The CPU attention ops against the fp64 oracle: 1e-5 relative error (Frobenius) for outputs and
// gradients, over options, lengths, packs and kinds of inputs.
#include <gtest/gtest.h>

#include "ops/attention.h"
#include "unit/attention/cases.h"

namespace sbtrain::test {
namespace {

constexpr double kBound = 1e-5;

void expect_close(const Tensor& actual, const std::vector<double>& reference, const char* name) {
  EXPECT_LE(relative_error(actual, reference), kBound) << name;
}

void check_stickbreaking(const Case& c) {
  SCOPED_TRACE("stick-breaking, " + c.describe());
  Attention x(c);
  x.stickbreaking_forward();
  x.stickbreaking_backward();
  const oracle::Result expected = oracle::stickbreaking(x.problem());
  expect_close(x.o, expected.o, "o");
  expect_close(x.row, expected.row, "rem");
  expect_close(x.part(x.dqkv, 0), expected.dq, "dq");
  expect_close(x.part(x.dqkv, 1), expected.dk, "dk");
  expect_close(x.part(x.dqkv, 2), expected.dv, "dv");
  if (c.gated) expect_close(x.dgate, expected.dgate, "dgate");
  if (c.remainder == ops::Remainder::kBias) expect_close(x.dbias, expected.dbias, "dbias");
  EXPECT_TRUE(x.o.gaps_intact());
}

// A gradient that is zero for every input (softmax over one key) is a difference of terms as large
// as the output's gradient. The error is then relative to the output's gradient.
void expect_gradient(const Tensor& actual, const std::vector<double>& reference, const Tensor& dout,
                     const char* name) {
  const std::vector<double> zero(reference.size(), 0.0);
  if (relative_error(reference, zero) > 0) return expect_close(actual, reference, name);
  const std::vector<double> scale = to_f64(dout);
  EXPECT_LE(relative_error(actual, zero),
            kBound * relative_error(scale, std::vector<double>(scale.size(), 0.0)))
      << name;
}

// Compares all of FIRE's gradients except that of b2, which is always zero, because softmax ignores
// a constant. With one key all of them are zero.
void expect_fire(const Attention& x, const std::vector<double>& expected) {
  const auto weights = static_cast<int64_t>(expected.size()) - x.config.heads;
  if (relative_error(expected, std::vector<double>(expected.size(), 0.0)) > 1e-6) {
    expect_close(x.dfire.tensor().row_range(0, weights),
                 {expected.begin(), expected.begin() + weights}, "dfire");
  }
  double b2 = 0;
  for (int h = 0; h < x.config.heads; ++h) b2 += std::abs(x.dfire.f32()[weights + h]);
  EXPECT_LT(b2, 1e-5 * static_cast<double>(x.config.tokens()));
}

void check_softmax(const Case& c) {
  SCOPED_TRACE("softmax, " + c.describe());
  Attention x(c);
  x.softmax_forward();
  x.softmax_backward();
  const oracle::Result expected = oracle::softmax(x.problem());
  expect_close(x.o, expected.o, "o");
  expect_close(x.row, expected.row, "lse");
  expect_gradient(x.part(x.dqkv, 0), expected.dq, x.dout, "dq");
  expect_gradient(x.part(x.dqkv, 1), expected.dk, x.dout, "dk");
  expect_close(x.part(x.dqkv, 2), expected.dv, "dv");
  if (c.bias == Bias::kFire) expect_fire(x, expected.dfire);
  EXPECT_TRUE(x.o.gaps_intact());
}

const std::vector<int32_t> kPack = {1, 129, 2, 0, 127, 1, 128, 64, 63, 65};

Case with(std::vector<int32_t> documents, Inputs inputs) {
  Case c;
  c.documents = std::move(documents);
  c.inputs = inputs;
  return c;
}

TEST(StickBreakingParity, EveryLengthTo64) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (int32_t length = 1; length <= 64; ++length) {
      for (const Case& c : stickbreaking_options(with({length}, inputs))) check_stickbreaking(c);
    }
  }
}

TEST(StickBreakingParity, LengthsAroundTiles) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const int32_t length : {127, 128, 129, 500}) {
      for (const Case& c : stickbreaking_options(with({length}, inputs))) check_stickbreaking(c);
    }
  }
}

TEST(StickBreakingParity, PackedDocuments) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const Case& c : stickbreaking_options(with(kPack, inputs))) check_stickbreaking(c);
  }
}

TEST(StickBreakingParity, HeadDimensions) {
  for (const int64_t head_dim : {1, 5, 32, 64, 100, 128}) {
    Case c = with({130, 70}, Inputs::kTrained);
    c.heads = 3;
    c.head_dim = head_dim;
    c.remainder = ops::Remainder::kValue;
    c.gated = true;
    check_stickbreaking(c);
  }
}

// Eight heads of queries with as many heads of keys and values, and in groups down to one of them.
std::vector<Case> in_groups(const Case& base) {
  std::vector<Case> cases;
  for (const int group : {1, 2, 4, 8}) {
    Case c = base;
    c.heads = 8;
    c.group = group;
    cases.push_back(c);
  }
  return cases;
}

TEST(StickBreakingParity, GroupsOfHeads) {
  for (const Case& base : stickbreaking_options(with({1, 129, 70}, Inputs::kTrained))) {
    for (const Case& c : in_groups(base)) check_stickbreaking(c);
  }
}

TEST(StickBreakingParity, Length2048) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    Case base = with({2048}, inputs);
    base.heads = 1;
    for (const Case& c : stickbreaking_options(base)) check_stickbreaking(c);
  }
}

// Betas of about 2e-8 vanish against 1 in fp32, but thousands of them shorten the stick.
TEST(StickBreakingParity, ManyTinyBetas) {
  Case c = with({4096}, Inputs::kTrained);
  c.heads = 1;
  c.scale = 1.1f;
  c.remainder = ops::Remainder::kValue;
  check_stickbreaking(c);
}

// Betas within rounding of 1, with some gates of exactly 1: nothing may cancel or divide by 0.
TEST(StickBreakingParity, SaturatedLogits) {
  for (const Case& base : stickbreaking_options(with({129, 40}, Inputs::kStandard))) {
    Case c = base;
    c.scale = 5.0f;  // logits of std 20
    check_stickbreaking(c);
    c.inputs = Inputs::kTrained;
    c.scale = -1.0f;  // all logits about +16: gradients depend on 1 - sigma
    check_stickbreaking(c);
  }
}

TEST(StickBreakingParity, ScaleOfZero) {
  for (const Case& base : stickbreaking_options(with({129, 40}, Inputs::kStandard))) {
    Case c = base;
    c.scale = 0.0f;
    check_stickbreaking(c);
  }
}

TEST(StickBreakingParity, Length4096) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    Case c = with({4096}, inputs);
    c.heads = 1;
    check_stickbreaking(c);
    c.gated = true;
    c.remainder = ops::Remainder::kBias;
    check_stickbreaking(c);
  }
}

TEST(StickBreakingParity, Length16384) {
  Case c = with({16384}, Inputs::kTrained);
  c.heads = 1;
  c.gated = true;
  c.remainder = ops::Remainder::kValue;
  check_stickbreaking(c);
}

TEST(StickBreakingParity, Length16384Standard) {
  Case c = with({16384}, Inputs::kStandard);
  c.heads = 1;
  check_stickbreaking(c);
}

TEST(SoftmaxParity, EveryLengthTo64) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (int32_t length = 1; length <= 64; ++length) {
      for (const int64_t window : {0, 1, 7, 64}) {
        Case c = with({length}, inputs);
        c.window = window;
        check_softmax(c);
      }
    }
  }
}

TEST(SoftmaxParity, LengthsAroundTilesAndPacks) {
  const std::vector<std::vector<int32_t>> packs = {{127}, {128}, {129}, {500}, kPack};
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const auto& documents : packs) {
      for (const int64_t window : {0, 1, 63, 64, 65, 128, 200}) {
        Case c = with(documents, inputs);
        c.window = window;
        check_softmax(c);
      }
    }
  }
}

TEST(SoftmaxParity, HeadDimensions) {
  for (const int64_t head_dim : {1, 5, 32, 64, 100, 128}) {
    Case c = with({130, 70}, Inputs::kStandard);
    c.heads = 3;
    c.head_dim = head_dim;
    check_softmax(c);
  }
}

TEST(SoftmaxParity, GroupsOfHeads) {
  for (const Bias bias : {Bias::kNone, Bias::kAlibi, Bias::kFire}) {
    for (const int64_t window : {0, 63}) {
      Case base = with({1, 129, 70}, Inputs::kStandard);
      base.bias = bias;
      base.window = window;
      for (const Case& c : in_groups(base)) check_softmax(c);
    }
  }
}

TEST(SoftmaxParity, LongDocuments) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    Case c = with({2048}, inputs);
    c.heads = 1;
    check_softmax(c);
    c.documents = {4096};
    check_softmax(c);
    c.documents = {16384};
    c.window = 1024;
    check_softmax(c);
  }
}

TEST(SoftmaxParity, PositionBiases) {
  for (const Bias bias : {Bias::kAlibi, Bias::kFire}) {
    for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
      for (const auto& documents : std::vector<std::vector<int32_t>>{
               {1}, {2}, {63}, {64}, {65}, {127}, {129}, {500}, kPack}) {
        for (const int64_t window : {0, 1, 63, 200}) {
          Case c = with(documents, inputs);
          c.heads = 3;
          c.bias = bias;
          c.window = window;
          // Lengths on both sides of |m L0|.
          for (const float m : {1.0f, -0.1f}) {
            c.fire_m = m;
            check_softmax(c);
            if (bias == Bias::kAlibi) break;
          }
          if (bias == Bias::kFire) {
            c.fire_length =
                73.0f;  // with neither m are |m L0| and a position equal but for rounding
            check_softmax(c);
          }
        }
      }
    }
  }
}

TEST(SoftmaxParity, PositionBiasesOfLongDocuments) {
  for (const Bias bias : {Bias::kAlibi, Bias::kFire}) {
    Case c = with({2048, 700}, Inputs::kTrained);
    c.heads = 2;
    c.bias = bias;
    check_softmax(c);
  }
}

TEST(SoftmaxParity, Length16384) {
  Case c = with({16384}, Inputs::kStandard);
  c.heads = 1;
  c.head_dim = 8;
  check_softmax(c);
}

}  // namespace
}  // namespace sbtrain::test
