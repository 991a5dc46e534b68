// Properties of the attention ops that need no oracle, and those of skipping and decoding.
#include <gtest/gtest.h>

#include "core/error.h"
#include "ops/attention.h"
#include "unit/attention/cases.h"

namespace sbtrain::test {
namespace {

bool all_finite(const Tensor& x) {
  for (const double value : to_f64(x)) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

// Multiplies a [T, 3*H*d] matrix's rows [begin, end) of columns [first, last) by `factor`.
void scale_rows(Owned& x, int64_t begin, int64_t end, int64_t first, int64_t last, float factor) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t c = first; c < last; ++c) x.at(t, c) *= factor;
  }
}

void expect_same(const Attention& a, const Attention& b) {
  EXPECT_TRUE(bitwise_equal(a.o, b.o));
  EXPECT_TRUE(bitwise_equal(a.row, b.row));
  EXPECT_TRUE(bitwise_equal(a.dqkv, b.dqkv));
  EXPECT_TRUE(!a.config.gated || bitwise_equal(a.dgate, b.dgate));
  EXPECT_TRUE(bitwise_equal(a.dbias, b.dbias));
  EXPECT_TRUE(bitwise_equal(a.dfire, b.dfire));
}

TEST(StickBreaking, RepeatsBitForBit) {
  Case c;
  c.documents = {300, 7, 200};
  c.gated = true;
  c.remainder = ops::Remainder::kBias;
  Attention a(c), b(c);
  for (Attention* x : {&a, &b}) {
    x->stickbreaking_forward();
    x->stickbreaking_backward();
  }
  expect_same(a, b);
}

TEST(Softmax, RepeatsBitForBit) {
  for (const Bias bias : {Bias::kNone, Bias::kAlibi, Bias::kFire}) {
    Case c;
    c.documents = {300, 7, 200};
    c.bias = bias;
    Attention a(c), b(c);
    for (Attention* x : {&a, &b}) {
      x->softmax_forward();
      x->softmax_backward();
    }
    expect_same(a, b);
  }
}

TEST(Softmax, SlopesOfAlibi) {
  const auto slopes = [](int heads) {
    std::vector<double> all;
    for (int h = 0; h < heads; ++h) all.push_back(ops::alibi_slope(heads, h));
    return all;
  };
  EXPECT_EQ(slopes(1), (std::vector<double>{0x1p-8}));
  EXPECT_EQ(slopes(4), (std::vector<double>{0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8}));
  EXPECT_EQ(slopes(8),
            (std::vector<double>{0x1p-1, 0x1p-2, 0x1p-3, 0x1p-4, 0x1p-5, 0x1p-6, 0x1p-7, 0x1p-8}));
  // The heads beyond a power of two: every second slope of twice as many heads.
  EXPECT_EQ(slopes(6), (std::vector<double>{0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1, 0x1p-3}));
}

// Gives y, which has no groups, the numbers of x: a copy of the keys and values of a group for each
// of its heads.
void repeat_keys(const Attention& x, Attention& y) {
  const Case& c = y.config;
  const int64_t d = c.head_dim;
  for (int64_t t = 0; t < c.tokens(); ++t) {
    for (int64_t i = 0; i < c.width(); ++i) {
      const int64_t from = i / d / x.config.group * d + i % d;
      y.q().f32()[t * y.qkv.tensor().row_stride + i] = x.q().f32()[t * x.q().row_stride + i];
      y.k().f32()[t * y.k().row_stride + i] = x.k().f32()[t * x.k().row_stride + from];
      y.v().f32()[t * y.v().row_stride + i] = x.v().f32()[t * x.v().row_stride + from];
    }
  }
}
// Sums of the heads of groups.
std::vector<double> summed(const std::vector<double>& x, const Case& c) {
  std::vector<double> y(x.size() / c.group);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t head = i / c.head_dim;
    y[head / c.group * c.head_dim + i % c.head_dim] += x[i];
  }
  return y;
}
// A group reads what each of its heads would read of its own, and dk and dv are its sums.
template <typename Run>
void expect_like_repeated(const Case& c, const Run& run) {
  Case whole = c;
  whole.group = 1;
  Attention x(c), y(whole);
  repeat_keys(x, y);
  run(x);
  run(y);
  EXPECT_TRUE(bitwise_equal(x.o, y.o)) << c.describe();
  EXPECT_TRUE(bitwise_equal(x.row, y.row)) << c.describe();
  EXPECT_TRUE(bitwise_equal(x.part(x.dqkv, 0), y.part(y.dqkv, 0))) << c.describe();
  EXPECT_TRUE(!c.gated || bitwise_equal(x.dgate, y.dgate)) << c.describe();
  EXPECT_TRUE(bitwise_equal(x.dfire, y.dfire)) << c.describe();
  for (const int part : {1, 2}) {
    EXPECT_LE(relative_error(x.part(x.dqkv, part), summed(to_f64(y.part(y.dqkv, part)), c)), 1e-6)
        << c.describe();
  }
}

TEST(StickBreaking, GroupsAreLikeRepeatedKeysAndValues) {
  for (Case c : stickbreaking_options({.documents = {200, 3}, .heads = 6})) {
    c.group = 3;
    expect_like_repeated(c, [](Attention& x) {
      x.stickbreaking_forward();
      x.stickbreaking_backward();
    });
  }
}

TEST(Softmax, GroupsAreLikeRepeatedKeysAndValues) {
  for (const Bias bias : {Bias::kNone, Bias::kAlibi, Bias::kFire}) {
    Case c{.documents = {200, 3}, .heads = 6, .group = 2};
    c.bias = bias;
    expect_like_repeated(c, [](Attention& x) {
      x.softmax_forward();
      x.softmax_backward();
    });
  }
}

TEST(Softmax, RefusesHeadsThatFormNoGroups) {
  Attention x({.heads = 4, .head_dim = 16});
  for (const int64_t width : {3 * 16, 8}) {
    EXPECT_THROW(ops::run(x.stream, ops::SoftmaxForward{.o_THd = x.o,
                                                        .lse_HT = x.row,
                                                        .q_THd = x.q(),
                                                        .k_THd = x.k().col_range(0, width),
                                                        .v_THd = x.v().col_range(0, width),
                                                        .sequences = x.sequences(),
                                                        .params = x.softmax_params()}),
                 Error)
        << width;
  }
}

// Compares every tensor's rows of all documents except the second, whose inputs differ.
template <typename Run>
void expect_no_leak(Case c, Run&& run) {
  c.documents = {70, 65, 130};
  Attention a(c), b(c);
  for (int64_t t = 70; t < 135; ++t) {
    for (int64_t i = 0; i < 3 * c.width(); ++i) b.qkv.at(t, i) = -1000.0f * b.qkv.at(t, i);
    for (int64_t i = 0; i < c.width(); ++i) b.dout.at(t, i) *= 1e6f;
    for (int64_t h = 0; h < c.heads; ++h) b.gate.at(t, h) = 0.01f;
  }
  run(a);
  run(b);
  for (const auto& range : {std::pair{0, 70}, std::pair{135, 130}}) {
    const int begin = range.first;
    const int count = range.second;
    const auto same = [&](const Owned& x, const Owned& y) {
      return bitwise_equal(x.tensor().row_range(begin, count), y.tensor().row_range(begin, count));
    };
    EXPECT_TRUE(same(a.o, b.o));
    EXPECT_TRUE(same(a.dqkv, b.dqkv));
    EXPECT_TRUE(!c.gated || same(a.dgate, b.dgate));
    EXPECT_TRUE(bitwise_equal(a.row.tensor().col_range(begin, count),
                              b.row.tensor().col_range(begin, count)));
  }
  EXPECT_FALSE(bitwise_equal(a.o, b.o));
}

TEST(StickBreaking, DocumentsDoNotLeak) {
  for (const Case& c : stickbreaking_options(Case{})) {
    expect_no_leak(c, [](Attention& x) {
      x.stickbreaking_forward();
      x.stickbreaking_backward();
    });
  }
}

TEST(Softmax, DocumentsDoNotLeak) {
  for (const Bias bias : {Bias::kNone, Bias::kAlibi, Bias::kFire}) {
    for (const int64_t window : {0, 20}) {
      Case c;
      c.window = window;
      c.bias = bias;
      expect_no_leak(c, [](Attention& x) {
        x.softmax_forward();
        x.softmax_backward();
      });
    }
  }
}

// Logits from -1e4 to 1e4 and a million beyond.
TEST(StickBreaking, NoNaNForHugeLogits) {
  for (const float logit : {1e4f, 1e6f, 1e10f}) {
    for (const Case& base : stickbreaking_options(Case{})) {
      Case c = base;
      c.documents = {150};
      Attention x(c);
      scale_rows(x.qkv, 0, c.tokens(), 0, c.width(), logit);
      x.stickbreaking_forward();
      x.stickbreaking_backward();
      EXPECT_TRUE(all_finite(x.o) && all_finite(x.row) && all_finite(x.dqkv)) << c.describe();
      EXPECT_TRUE(!c.gated || all_finite(x.dgate)) << c.describe();
    }
  }
}

TEST(StickBreaking, NoNaNForLogitsOfOneSign) {
  for (const float sign : {1.0f, -1.0f}) {
    for (const Case& base : stickbreaking_options(Case{})) {
      Case c = base;
      c.documents = {150};
      Attention x(c);
      for (int64_t t = 0; t < c.tokens(); ++t) {
        for (int64_t i = 0; i < c.width(); ++i) {
          x.qkv.at(t, i) = sign * 50.0f;
          x.qkv.at(t, c.width() + i) = 50.0f;  // z = +-1e4
        }
      }
      x.stickbreaking_forward();
      x.stickbreaking_backward();
      EXPECT_TRUE(all_finite(x.o) && all_finite(x.row) && all_finite(x.dqkv)) << c.describe();
      EXPECT_TRUE(!c.gated || all_finite(x.dgate)) << c.describe();
    }
  }
}

TEST(Softmax, NoNaNForHugeLogits) {
  for (const float logit : {1e4f, 1e10f}) {
    Case c;
    c.documents = {150};
    Attention x(c);
    scale_rows(x.qkv, 0, c.tokens(), 0, c.width(), logit);
    x.softmax_forward();
    x.softmax_backward();
    EXPECT_TRUE(all_finite(x.o) && all_finite(x.row) && all_finite(x.dqkv));
  }
}

TEST(StickBreaking, FirstTokenKeepsItsWholeStick) {
  Case c;
  c.documents = {1, 3, 65};
  c.remainder = ops::Remainder::kValue;
  Attention x(c);
  x.stickbreaking_forward();
  for (const int64_t first : {0, 1, 4}) {
    EXPECT_EQ(x.row.at(0, first), 1.0f);
    EXPECT_TRUE(bitwise_equal(x.o.tensor().row_range(first, 1), x.v().row_range(first, 1)));
  }
  c.remainder = ops::Remainder::kNone;
  Attention none(c);
  none.stickbreaking_forward();
  for (int64_t i = 0; i < c.width(); ++i) EXPECT_EQ(none.o.at(4, i), 0.0f);
}

// Standard inputs use up the stick within 100 keys; inputs like trained ones leave 1e-2 after 400.
Case skipping_case(float epsilon, Inputs inputs) {
  Case c;
  c.documents = {1000, 90};
  c.remainder = ops::Remainder::kValue;
  c.gated = true;
  c.skip_epsilon = epsilon;
  c.inputs = inputs;
  return c;
}

TEST(StickBreaking, SkippingStaysWithinEpsilon) {
  for (const auto& [epsilon, inputs] :
       {std::pair{1e-2f, Inputs::kTrained}, std::pair{0x1p-24f, Inputs::kStandard}}) {
    Attention off(skipping_case(0.0f, inputs)), on(skipping_case(epsilon, inputs));
    off.stickbreaking_forward();
    on.stickbreaking_forward();
    double largest = 0;
    for (const double v : to_f64(off.v())) largest = std::max(largest, std::abs(v));
    const std::vector<double> a = to_f64(on.o), b = to_f64(off.o);
    for (size_t i = 0; i < a.size(); ++i) {
      // The skipped keys weigh less than epsilon; the remainder grows by their weight.
      EXPECT_LE(std::abs(a[i] - b[i]), 2 * largest * epsilon + 1e-6);
    }
    for (const double stop : to_f64(off.stop)) EXPECT_EQ(stop, 0);
    const std::vector<double> stops = to_f64(on.stop);
    EXPECT_GT(stops[999], 0) << "nothing was skipped";
    for (int64_t t = 0; t < 1090; ++t) {
      const int64_t position = t < 1000 ? t : t - 1000;
      const int64_t tile = t - position + position / 64 * 64;
      EXPECT_EQ(stops[t], stops[tile]) << "one stop for each tile";
      if (stops[t] > 0) {
        EXPECT_LT(on.row.f32()[t], epsilon);
      }
    }
  }
}

// The function that skipping computes, and its own gradient.
TEST(StickBreaking, SkippedGradientsAreThoseOfTheTruncatedFunction) {
  for (const bool gated : {false, true}) {
    Case c = skipping_case(1e-2f, Inputs::kTrained);
    c.gated = gated;
    c.remainder_gradient = true;
    Attention x(c);
    x.stickbreaking_forward();
    x.stickbreaking_backward();
    oracle::Problem p = x.problem();
    for (const double stop : to_f64(x.stop)) p.first_key.push_back(static_cast<int32_t>(stop));
    const oracle::Result expected = oracle::stickbreaking(p);
    EXPECT_LE(relative_error(x.o, expected.o), 1e-5);
    EXPECT_LE(relative_error(x.row, expected.row), 1e-5);
    EXPECT_LE(relative_error(x.part(x.dqkv, 0), expected.dq), 1e-5);
    EXPECT_LE(relative_error(x.part(x.dqkv, 1), expected.dk), 1e-5);
    EXPECT_LE(relative_error(x.part(x.dqkv, 2), expected.dv), 1e-5);
    if (gated) {
      EXPECT_LE(relative_error(x.dgate, expected.dgate), 1e-5);
    }
  }
}

// The cache of keys, values and gates that decoding reads: document 0, padded.
struct DecodeInputs {
  DecodeInputs(const Attention& x, int64_t length)
      : k(poisoned({1, length + 5, x.config.key_width()})),
        v(poisoned({1, length + 5, x.config.key_width()})),
        gate(poisoned({1, length + 5, x.config.heads})),
        lengths(integers({static_cast<int32_t>(length)})),
        o(poisoned({1, x.config.width()})) {
    for (int64_t t = 0; t < length; ++t) {
      const int64_t width = x.config.key_width();
      for (int64_t i = 0; i < width; ++i) {
        k.f32()[t * width + i] = x.k().f32()[t * x.k().row_stride + i];
        v.f32()[t * width + i] = x.v().f32()[t * x.v().row_stride + i];
      }
      for (int64_t h = 0; h < x.config.heads; ++h) {
        gate.f32()[t * x.config.heads + h] = x.gate.f32()[t * x.config.heads + h];
      }
    }
  }
  ops::StickBreakingDecode stickbreaking(const Attention& x, int64_t length) const {
    return {.o_BHd = o,
            .q_BHd = x.q().row_range(length - 1, 1),
            .k_cache_BCGd = k,
            .v_cache_BCGd = v,
            .gate_cache_BCH = x.config.gated ? gate.tensor() : Tensor(),
            .remainder_bias_Hd = x.bias,
            .lengths_B = lengths,
            .params = x.stickbreaking_params()};
  }
  ops::SoftmaxDecode softmax(const Attention& x, int64_t length) const {
    return {.o_BHd = o,
            .q_BHd = x.q().row_range(length - 1, 1),
            .k_cache_BCGd = k,
            .v_cache_BCGd = v,
            .lengths_B = lengths,
            .params = x.softmax_params()};
  }
  Owned k, v, gate, lengths, o;
};

// After x's forward pass, decoding some tokens against those before them gives the same outputs.
template <typename Decode>
void expect_decode_equals_forward(Attention& x, const Decode& decode) {
  for (const int64_t length : {1, 2, 63, 64, 65, 129, 200}) {
    const DecodeInputs inputs(x, length);
    ops::run(x.stream, decode(inputs, length));
    EXPECT_LE(relative_error(inputs.o, to_f64(x.o.tensor().row_range(length - 1, 1))), 1e-5)
        << x.config.describe() << ", token " << length;
  }
}

TEST(StickBreaking, DecodeEqualsForward) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (Case c : stickbreaking_options(Case{})) {
      c.documents = {200};
      c.inputs = inputs;
      c.heads = 4;
      c.group = 2;
      Attention x(c);
      x.stickbreaking_forward();
      expect_decode_equals_forward(x, [&](const DecodeInputs& inputs_at, int64_t length) {
        return inputs_at.stickbreaking(x, length);
      });
    }
  }
}

TEST(Softmax, DecodeEqualsForward) {
  for (const int64_t window : {0, 1, 70}) {
    Case c;
    c.documents = {200};
    c.window = window;
    c.heads = 4;
    c.group = 2;
    Attention x(c);
    x.softmax_forward();
    expect_decode_equals_forward(
        x, [&](const DecodeInputs& inputs, int64_t length) { return inputs.softmax(x, length); });
  }
}

TEST(CacheAppend, WritesOneRowForEachSequence) {
  CpuStream s;
  Owned cache = constant({2, 4, 3}, 0.0);
  const Owned x = random_normal("x", {2, 3}, 1.0, 0.0, 5);
  const Owned positions = integers({3, 0});
  ops::run(s, ops::CacheAppend{.cache_BCN = cache, .x_BN = x, .positions_B = positions});
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(cache.f32()[3 * 3 + i], x.f32()[i]);
    EXPECT_EQ(cache.f32()[4 * 3 + i], x.f32()[8 + i]);
    EXPECT_EQ(cache.f32()[i], 0.0f);
  }
  EXPECT_THROW(
      ops::run(s, ops::CacheAppend{.cache_BCN = cache, .x_BN = x, .positions_B = integers({0, 4})}),
      Error);
}

// The memory that a plan records does not depend on the documents, and is enough for every step.
TEST(AttentionPlan, ScratchDependsOnTheLongestAllowedDocumentAlone) {
  Memory plan(Backend::kPlan);
  Memory memory(Backend::kCpu);
  const auto step = [](Memory& m, const std::vector<int32_t>& lengths) {
    Case c;
    c.documents = lengths;
    Attention x(c);
    Stream s(m);
    Sequences sequences = x.sequences();
    sequences.max_seqlen = 128;
    const ProgramScope scope(m, "step");
    ops::run(s, ops::StickBreakingForward{.o_THd = x.o,
                                          .log2_rem_HT = x.log2_rem,
                                          .stop_HT = x.stop,
                                          .q_THd = x.q(),
                                          .k_THd = x.k(),
                                          .v_THd = x.v(),
                                          .sequences = sequences,
                                          .params = x.stickbreaking_params()});
    ops::run(s, ops::StickBreakingBackward{.dq_THd = x.part(x.dqkv, 0),
                                           .dk_THd = x.part(x.dqkv, 1),
                                           .dv_THd = x.part(x.dqkv, 2),
                                           .do_THd = x.dout,
                                           .log2_rem_HT = x.log2_rem,
                                           .stop_HT = x.stop,
                                           .q_THd = x.q(),
                                           .k_THd = x.k(),
                                           .v_THd = x.v(),
                                           .sequences = sequences,
                                           .params = x.stickbreaking_params()});
  };
  step(plan, {128, 128});
  memory.adopt_plan(plan);
  EXPECT_NO_THROW(step(memory, {128, 128}));
  EXPECT_NO_THROW(step(memory, {1, 255 - 128, 128}));
  EXPECT_THROW(step(memory, {129, 127}), Error) << "longer than announced";
}

}  // namespace
}  // namespace sbtrain::test
