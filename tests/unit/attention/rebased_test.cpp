// Based and ReBased attention against their definition in fp64, in both forms; the short
// convolution against its own.
#include "ops/rebased.h"

#include <gtest/gtest.h>

#include <array>

#include "core/error.h"
#include "ops/short_conv.h"
#include "support/tensors.h"
#include "unit/attention/rebased_oracle.h"

namespace sbtrain::test {
namespace {

// The op's inputs and outputs: q, k and v are columns of one matrix.
struct RebasedProblem {
  explicit RebasedProblem(const RebasedCase& c)
      : config(c),
        qkv(random_normal("qkv", {c.tokens(), width()}, 1.0, c.mean)),
        dout(random_normal("do", {c.tokens(), c.heads * c.e})),
        o(poisoned({c.tokens(), c.heads * c.e}, 3)),
        den(poisoned({c.heads, c.tokens()})),
        dqkv(poisoned({c.tokens(), width()})),
        bounds(integers(c.bounds())) {
    // The mean is for q and k. In v it would make the gradients differences of nearly equal
    // numbers.
    const Tensor values = v(qkv);
    for (int64_t t = 0; t < values.rows(); ++t) {
      for (int64_t i = 0; i < values.cols(); ++i) {
        values.f32()[t * values.row_stride + i] -= static_cast<float>(c.mean);
      }
    }
  }

  int64_t width() const { return config.heads * (2 * config.f + config.e); }
  Tensor q(const Owned& all) const { return all.tensor().col_range(0, config.heads * config.f); }
  Tensor k(const Owned& all) const {
    return all.tensor().col_range(config.heads * config.f, config.heads * config.f);
  }
  Tensor v(const Owned& all) const {
    return all.tensor().col_range(2 * config.heads * config.f, config.heads * config.e);
  }
  void run() {
    Sequences sequences;
    sequences.cu_seqlens = bounds;
    sequences.count = static_cast<int64_t>(config.documents.size());
    sequences.max_seqlen = config.tokens();
    ops::run(s, ops::RebasedForward{.o_THe = o,
                                    .den_HT = den,
                                    .q_THf = q(qkv),
                                    .k_THf = k(qkv),
                                    .v_THe = v(qkv),
                                    .sequences = sequences,
                                    .params = config.params()});
    ops::run(s, ops::RebasedBackward{.dq_THf = q(dqkv),
                                     .dk_THf = k(dqkv),
                                     .dv_THe = v(dqkv),
                                     .do_THe = dout,
                                     .o_THe = o,
                                     .den_HT = den,
                                     .q_THf = q(qkv),
                                     .k_THf = k(qkv),
                                     .v_THe = v(qkv),
                                     .sequences = sequences,
                                     .params = config.params()});
  }
  RebasedResult expected() const {
    return rebased_reference(config, to_f64(q(qkv)), to_f64(k(qkv)), to_f64(v(qkv)), to_f64(dout));
  }

  RebasedCase config;
  CpuStream s;
  Owned qkv, dout, o, den, dqkv, bounds;
};

void check(const RebasedCase& c) {
  SCOPED_TRACE(c.describe());
  RebasedProblem p(c);
  p.run();
  const RebasedResult expected = p.expected();
  EXPECT_LE(relative_error(p.o, expected.o), 1e-5);
  EXPECT_LE(relative_error(p.v(p.dqkv), expected.dv), 1e-5);
  const auto check_gradient = [&](const Tensor& actual, const std::vector<double>& gradient) {
    // With one key the weights have no influence: their gradients are rounding errors.
    if (c.tokens() == static_cast<int64_t>(c.documents.size())) {
      EXPECT_LE(relative_error(actual, std::vector<double>(gradient.size())), 1e-4);
      return;
    }
    // A query whose weights are all near zero divides by their small sum, so single elements are
    // less exact than the whole.
    const RelativeErrors errors = relative_errors(to_f64(actual), gradient);
    EXPECT_LE(errors.frobenius, 1e-5);
    EXPECT_LE(errors.largest, 1e-4);
  };
  check_gradient(p.q(p.dqkv), expected.dq);
  check_gradient(p.k(p.dqkv), expected.dk);
  EXPECT_TRUE(p.o.gaps_intact());
}

const std::vector<int32_t> kPack = {1, 129, 2, 0, 127, 1, 128, 64, 63, 65};

TEST(Rebased, AgreesWithTheDefinition) {
  for (const bool rebased : {false, true}) {
    for (const bool quadratic : {false, true}) {
      for (const auto& documents : std::vector<std::vector<int32_t>>{
               {1}, {2}, {3}, {17}, {63}, {64}, {65}, {127}, {128}, {129}, {500}, kPack}) {
        RebasedCase c;
        c.documents = documents;
        c.rebased = rebased;
        c.quadratic = quadratic;
        // Keeps dot products away from 0: with few keys their squares would give a tiny
        // denominator.
        c.mean = 0.5;
        check(c);
      }
    }
  }
}

TEST(Rebased, HeadShapesAndLongDocuments) {
  for (const bool rebased : {false, true}) {
    for (const bool quadratic : {false, true}) {
      for (const auto& [f, e] : {std::pair{2, 1}, std::pair{3, 5}, std::pair{8, 70}}) {
        RebasedCase c;
        c.documents = {150, 70};
        c.rebased = rebased;
        c.quadratic = quadratic;
        c.heads = 3;
        c.f = f;
        c.e = e;
        c.mean = 1;
        check(c);
      }
      RebasedCase c;
      c.documents = {2048};
      c.rebased = rebased;
      c.quadratic = quadratic;
      c.heads = 1;
      c.mean = 0.5;
      check(c);
    }
  }
}

TEST(Rebased, ReferenceGradientsAreDerivatives) {
  for (const bool rebased : {false, true}) {
    RebasedCase c;
    c.documents = {1, 4, 3};
    c.rebased = rebased;
    c.f = 3;
    c.e = 2;
    const RebasedProblem p(c);
    const std::vector<double> q = to_f64(p.q(p.qkv)), k = to_f64(p.k(p.qkv));
    const std::vector<double> v = to_f64(p.v(p.qkv)), dout = to_f64(p.dout);
    const auto sum = [&](const std::vector<double>& q, const std::vector<double>& k,
                         const std::vector<double>& v) {
      const RebasedResult r = rebased_reference(c, q, k, v, dout);
      double total = 0;
      for (size_t i = 0; i < dout.size(); ++i) total += dout[i] * r.o[i];
      return total;
    };
    const RebasedResult r = rebased_reference(c, q, k, v, dout);
    using Vector = std::vector<double>;
    EXPECT_LT(
        relative_error(r.dq, numeric_gradient([&](const Vector& x) { return sum(x, k, v); }, q)),
        1e-6);
    EXPECT_LT(
        relative_error(r.dk, numeric_gradient([&](const Vector& x) { return sum(q, x, v); }, k)),
        1e-6);
    EXPECT_LT(
        relative_error(r.dv, numeric_gradient([&](const Vector& x) { return sum(q, k, x); }, v)),
        1e-6);
  }
}

TEST(Rebased, DocumentsDoNotLeakAndRunsRepeat) {
  for (const bool quadratic : {false, true}) {
    RebasedCase c;
    c.documents = {70, 65, 130};
    c.quadratic = quadratic;
    RebasedProblem a(c), b(c), again(c);
    for (int64_t t = 70; t < 135; ++t) {
      for (int64_t i = 0; i < a.width(); ++i) b.qkv.at(t, i) *= -100.0f;
    }
    a.run();
    b.run();
    again.run();
    EXPECT_TRUE(bitwise_equal(a.o, again.o) && bitwise_equal(a.dqkv, again.dqkv));
    for (const auto& [begin, count] : {std::pair{0, 70}, std::pair{135, 130}}) {
      EXPECT_TRUE(bitwise_equal(a.o.tensor().row_range(begin, count),
                                b.o.tensor().row_range(begin, count)));
      EXPECT_TRUE(bitwise_equal(a.dqkv.tensor().row_range(begin, count),
                                b.dqkv.tensor().row_range(begin, count)));
    }
    EXPECT_FALSE(bitwise_equal(a.o, b.o));
  }
}

// The state of any prefix and single steps after it give the outputs of the whole document.
TEST(Rebased, DecodesFromAState) {
  for (const bool rebased : {false, true}) {
    RebasedCase c;
    c.documents = {140};
    c.rebased = rebased;
    c.mean = 0.5;
    RebasedProblem p(c);
    p.run();
    const int64_t rows = ops::rebased_state_rows(c.f, c.params());
    EXPECT_EQ(rows, rebased ? 136 : 153);
    for (const int32_t prompt : {0, 1, 64, 130}) {
      const Owned state = poisoned({1, c.heads * rows, c.e + 1});
      if (prompt > 0) {
        ops::run(p.s,
                 ops::RebasedState{.state_Re = state.tensor().reshaped({c.heads * rows, c.e + 1}),
                                   .k_THf = p.k(p.qkv).row_range(0, prompt),
                                   .v_THe = p.v(p.qkv).row_range(0, prompt),
                                   .params = c.params()});
      }
      for (int32_t t = prompt; t < 140; ++t) {
        const Owned o = poisoned({1, c.heads * c.e});
        const Owned position = integers({t});
        ops::run(p.s, ops::RebasedDecode{.o_BHe = o,
                                         .q_BHf = p.q(p.qkv).row_range(t, 1),
                                         .k_BHf = p.k(p.qkv).row_range(t, 1),
                                         .v_BHe = p.v(p.qkv).row_range(t, 1),
                                         .state_BRe = state,
                                         .positions_B = position,
                                         .params = c.params()});
        ASSERT_LT(relative_error(o, to_f64(p.o.tensor().row_range(t, 1))), 2e-5) << t;
      }
    }
  }
}

// Bytes of scratch that both passes need for one document of all tokens.
size_t planned_scratch(Memory plan, const RebasedCase& c, int64_t tokens) {
  Stream s(plan);
  const DType real = plan.compute_dtype();
  const Tensor q(nullptr, real, {tokens, c.heads * c.f});
  const Tensor v(nullptr, real, {tokens, c.heads * c.e});
  const Tensor den(nullptr, DType::kF32, {c.heads, tokens});
  Sequences sequences;
  sequences.cu_seqlens = Tensor(nullptr, DType::kI32, {2});
  sequences.count = 1;
  sequences.max_seqlen = tokens;
  {
    const ProgramScope scope(plan, "step");
    ops::run(s, ops::RebasedForward{.o_THe = v,
                                    .den_HT = den,
                                    .q_THf = q,
                                    .k_THf = q,
                                    .v_THe = v,
                                    .sequences = sequences,
                                    .params = c.params()});
    ops::run(s, ops::RebasedBackward{.dq_THf = q,
                                     .dk_THf = q,
                                     .dv_THe = v,
                                     .do_THe = v,
                                     .o_THe = v,
                                     .den_HT = den,
                                     .q_THf = q,
                                     .k_THf = q,
                                     .v_THe = v,
                                     .sequences = sequences,
                                     .params = c.params()});
  }
  return plan.report().pool_bytes;
}

// On the CPU scratch is the same for every length: nothing is of size L, let alone L x L.
TEST(Rebased, MemoryDoesNotGrowWithTheLength) {
  for (const bool quadratic : {false, true}) {
    RebasedCase c;
    c.quadratic = quadratic;
    const auto pool = [&](int64_t tokens) {
      return planned_scratch(Memory(Backend::kPlan), c, tokens);
    };
    EXPECT_GT(pool(64), 0u);
    EXPECT_EQ(pool(64), pool(1 << 20));
  }
}

// On a GPU scratch is linear: a number for each query, and the states of as many heads as fit the
// budget.
TEST(Rebased, MemoryOnAGpuIsLinearInTheLength) {
  RebasedCase c;
  c.heads = 64;
  const auto pool = [&](int64_t tokens) {
    return planned_scratch(Memory::planning(Backend::kCuda), c, tokens);
  };
  const auto queries = [&](int64_t tokens) { return static_cast<size_t>(64 * 4 * tokens); };
  EXPECT_NEAR(static_cast<double>(pool(512)), static_cast<double>(queries(512)), 1024);
  const double states = 4.0 * 64 * 136 * 13 / 128;  // bytes for each token
  EXPECT_NEAR(static_cast<double>(pool(65536)),
              static_cast<double>(queries(65536)) + 65536 * states, 1024);
  EXPECT_LT(pool(1 << 20), queries(1 << 20) + (size_t{513} << 20));
  c.quadratic = true;
  EXPECT_NEAR(static_cast<double>(pool(65536)), static_cast<double>(queries(65536)), 1024);

  c.f = 33;
  try {
    pool(4096);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_NE(std::string(error.what()).find("33 features"), std::string::npos) << error.what();
  }
}

// ---- Short convolution ------------------------------------------------------------------------

constexpr int64_t kWidth = 5;
const std::vector<int32_t> kPositions = {0, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2};
const auto kTokens = static_cast<int64_t>(kPositions.size());

// u, gate, then w [D, 3], b, gate_bias.
std::vector<double> convolution(const std::array<std::vector<double>, 5>& x) {
  const auto& [u, gate, w, b, gate_bias] = x;
  std::vector<double> y;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = 0; i < kWidth; ++i) {
      double c = b[i];
      for (int64_t k = 0; k < 3; ++k) {
        const int64_t back = 2 - k;
        if (kPositions[t] >= back) c += w[i * 3 + k] * u[(t - back) * kWidth + i];
      }
      y.push_back(c * (gate[t * kWidth + i] + gate_bias[i]) + u[t * kWidth + i]);
    }
  }
  return y;
}

TEST(ShortConv, AgreesWithTheDefinition) {
  CpuStream s;
  const Owned u = random_normal("u", {kTokens, kWidth}, 1, 0, 2);
  const Owned gate = random_normal("gate", {kTokens, kWidth});
  const Owned w = random_normal("w", {kWidth, 3});
  const Owned b = random_normal("b", {kWidth});
  const Owned gate_bias = random_normal("gate bias", {kWidth});
  const Owned dy = random_normal("dy", {kTokens, kWidth});
  const Owned positions = integers(kPositions);
  const Owned y = poisoned({kTokens, kWidth}, 1);
  const ops::ShortConvWeights weights = {.w_D3 = w, .b_D = b, .gate_bias_D = gate_bias};
  ops::run(s, ops::ShortConvForward{
                  .y_TD = y, .u_TD = u, .gate_TD = gate, .positions_T = positions, .w = weights});
  const std::array<std::vector<double>, 5> inputs = {to_f64(u), to_f64(gate), to_f64(w), to_f64(b),
                                                     to_f64(gate_bias)};
  EXPECT_LT(relative_error(y, convolution(inputs)), 1e-6);
  EXPECT_TRUE(y.gaps_intact());

  const Owned du = poisoned({kTokens, kWidth});
  const Owned dgate = poisoned({kTokens, kWidth}, 1);
  const Owned dw = constant({kWidth, 3}, 1);
  const Owned db = constant({kWidth}, 2);
  const Owned dgate_bias = constant({kWidth}, 3);
  ops::run(s, ops::ShortConvBackward{.du_TD = du,
                                     .dgate_TD = dgate,
                                     .dy_TD = dy,
                                     .u_TD = u,
                                     .gate_TD = gate,
                                     .positions_T = positions,
                                     .dw = {.w_D3 = dw, .b_D = db, .gate_bias_D = dgate_bias},
                                     .w = weights});
  const std::array<Tensor, 5> gradients = {du, dgate, dw, db, dgate_bias};
  const std::array<double, 5> held = {0, 0, 1, 2, 3};
  for (size_t n = 0; n < 5; ++n) {
    const auto objective = [&](const std::vector<double>& x) {
      std::array<std::vector<double>, 5> changed = inputs;
      changed[n] = x;
      const std::vector<double> y = convolution(changed);
      double sum = 0;
      for (size_t i = 0; i < y.size(); ++i) sum += y[i] * to_f64(dy)[i];
      return sum;
    };
    std::vector<double> expected = numeric_gradient(objective, inputs[n]);
    for (double& value : expected) value += held[n];
    EXPECT_LT(relative_error(gradients[n], expected), 1e-6) << n;
  }
}

}  // namespace
}  // namespace sbtrain::test
