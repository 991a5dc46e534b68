// Based and ReBased attention on the GPU against their definition in fp64, in both forms.
#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/choose.h"
#include "ops/memory.h"
#include "ops/rebased.h"
#include "unit/attention/rebased_oracle.h"

namespace sbtrain::rebased_test {
namespace {

using test::OnGpu;
using test::Owned;
using test::RebasedCase;
using test::RebasedResult;
using Rebased = test::GpuOpTest;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kI32 = DType::kI32;

// Bound for gradients against a reference with the same outputs; the rest of the error comes from
// weights, slopes and results in bf16.
constexpr double kGradientError = 8e-3;

Owned positions_of(const RebasedCase& c) {
  std::vector<int32_t> positions;
  for (const int32_t length : c.documents) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  return test::integers(positions);
}

// The results of one run of both passes.
struct Outputs {
  std::vector<double> o, den, dq, dk, dv;
  std::vector<uint8_t> raw;  // every byte
  bool gaps = false;         // the gaps are unchanged
};

// q, k and v are columns of one matrix with a gap after each row; so are their gradients.
class Problem {
 public:
  Problem(test::GpuStream& gpu, const RebasedCase& c, int64_t gap)
      : gpu_(gpu),
        config_(c),
        gap_(gap),
        qkv_(test::random_bf16("qkv", {c.tokens(), width()}, 1.0, c.mean)),
        dout_(test::random_bf16("do", {c.tokens(), values()})),
        qkv_gpu_(gpu, qkv_, kBF16, gap),
        dout_gpu_(gpu, dout_, kBF16, gap),
        bounds_(gpu, test::integers(c.bounds()), kI32),
        positions_(gpu, positions_of(c), kI32) {}

  int64_t features() const { return config_.heads * config_.f; }
  int64_t values() const { return config_.heads * config_.e; }
  int64_t width() const { return 2 * features() + values(); }
  Tensor q(const Tensor& all) const { return all.col_range(0, features()); }
  Tensor k(const Tensor& all) const { return all.col_range(features(), features()); }
  Tensor v(const Tensor& all) const { return all.col_range(2 * features(), values()); }
  const OnGpu& qkv() const { return qkv_gpu_; }

  // max_seqlen is an upper bound, here so large that the chunked form is chosen.
  Sequences sequences() const {
    return {.cu_seqlens = bounds_,
            .positions_T = positions_,
            .count = static_cast<int64_t>(config_.documents.size()),
            .max_seqlen = std::max(config_.tokens(), ops::rebased_pairs(config_.e) + 1)};
  }

  Outputs run(bool quadratic) const {
    ops::RebasedParams params = config_.params();
    params.quadratic = quadratic;
    const int64_t tokens = config_.tokens();
    const OnGpu o(gpu_, kBF16, {tokens, values()}, gap_);
    const OnGpu den(gpu_, kF32, {config_.heads, tokens});
    const OnGpu dqkv(gpu_, kBF16, {tokens, width()}, gap_);
    ops::run(gpu_, ops::RebasedForward{.o_THe = o,
                                       .den_HT = den,
                                       .q_THf = q(qkv_gpu_),
                                       .k_THf = k(qkv_gpu_),
                                       .v_THe = v(qkv_gpu_),
                                       .sequences = sequences(),
                                       .params = params});
    ops::run(gpu_, ops::RebasedBackward{.dq_THf = q(dqkv),
                                        .dk_THf = k(dqkv),
                                        .dv_THe = v(dqkv),
                                        .do_THe = dout_gpu_,
                                        .o_THe = o,
                                        .den_HT = den,
                                        .q_THf = q(qkv_gpu_),
                                        .k_THf = k(qkv_gpu_),
                                        .v_THe = v(qkv_gpu_),
                                        .sequences = sequences(),
                                        .params = params});
    Outputs out;
    out.o = o.values();
    out.den = den.values();
    const std::vector<double> gradients = dqkv.values();
    out.dq = columns(gradients, 0, features());
    out.dk = columns(gradients, features(), features());
    out.dv = columns(gradients, 2 * features(), values());
    for (const OnGpu* x : {&o, &den, &dqkv}) {
      const std::vector<uint8_t> bytes = x->raw();
      out.raw.insert(out.raw.end(), bytes.begin(), bytes.end());
    }
    out.gaps = o.gaps_intact() && dqkv.gaps_intact();
    return out;
  }

  RebasedResult expected(const std::vector<double>& saved_o) const {
    return test::rebased_reference(config_, test::to_f64(q(qkv_)), test::to_f64(k(qkv_)),
                                   test::to_f64(v(qkv_)), test::to_f64(dout_), &saved_o);
  }

 private:
  std::vector<double> columns(const std::vector<double>& all, int64_t first, int64_t count) const {
    std::vector<double> out;
    for (int64_t t = 0; t < config_.tokens(); ++t) {
      const auto row = all.begin() + t * width() + first;
      out.insert(out.end(), row, row + count);
    }
    return out;
  }

  test::GpuStream& gpu_;
  RebasedCase config_;
  int64_t gap_;
  Owned qkv_, dout_;
  OnGpu qkv_gpu_, dout_gpu_, bounds_, positions_;
};

void check(test::GpuStream& gpu, RebasedCase c, int64_t gap) {
  for (const bool quadratic : {true, false}) {
    c.quadratic = quadratic;
    SCOPED_TRACE(c.describe() + ", f " + std::to_string(c.f) + ", gap " + std::to_string(gap));
    const Problem p(gpu, c, gap);
    const Outputs out = p.run(quadratic);
    const RebasedResult expected = p.expected(out.o);
    EXPECT_LE(test::relative_error(out.o, expected.o), test::kBf16Error);
    EXPECT_LE(test::relative_error(out.den, expected.den), test::kBf16Error);
    EXPECT_LE(test::relative_error(out.dq, expected.dq), kGradientError);
    EXPECT_LE(test::relative_error(out.dk, expected.dk), kGradientError);
    EXPECT_LE(test::relative_error(out.dv, expected.dv), kGradientError);
    EXPECT_TRUE(out.gaps);
    EXPECT_TRUE(p.run(quadratic).raw == out.raw) << "repeated";
  }
}

// Documents end at, before and after the ends of tiles and chunks.
const std::vector<int32_t> kMixed = {1, 2, 127, 128, 129, 500, 1, 0, 1, 63, 65};

TEST_F(Rebased, AgreesWithTheDefinition) {
  for (const bool rebased : {false, true}) {
    for (const auto& documents : std::vector<std::vector<int32_t>>{
             {2}, {17}, {127}, {128}, {129}, {257}, {1, 300}, kMixed}) {
      RebasedCase c;
      c.documents = documents;
      c.rebased = rebased;
      c.heads = 3;
      c.mean = 0.5;
      check(gpu(), c, 4);
    }
  }
}

TEST_F(Rebased, HeadShapes) {
  struct Shape {
    int heads;
    int64_t f, e, gap;
  };
  constexpr Shape kShapes[] = {{64, 16, 12, 0}, {2, 16, 16, 8},  {2, 16, 32, 0}, {3, 16, 64, 8},
                               {2, 16, 128, 0}, {2, 8, 100, 4},  {3, 5, 7, 1},   {1, 2, 1, 0},
                               {2, 24, 32, 8},  {1, 32, 128, 0}, {2, 17, 33, 3}};
  for (const bool rebased : {false, true}) {
    for (const Shape& shape : kShapes) {
      RebasedCase c;
      c.documents = {140, 3, 270};
      c.rebased = rebased;
      c.heads = shape.heads;
      c.f = shape.f;
      c.e = shape.e;
      c.mean = 0.5;
      check(gpu(), c, shape.gap);
    }
  }
}

TEST_F(Rebased, LongDocuments) {
  for (const bool rebased : {false, true}) {
    RebasedCase c;
    c.documents = {3, 4096, 70};
    c.rebased = rebased;
    c.heads = 1;
    check(gpu(), c, 0);
  }
}

TEST_F(Rebased, LoneTokensTakeTheirValue) {
  RebasedCase c;
  c.documents = std::vector<int32_t>(200, 1);
  c.mean = 2;
  for (const bool quadratic : {true, false}) {
    const Problem p(gpu(), c, 0);
    const Outputs out = p.run(quadratic);
    EXPECT_LE(test::relative_error(out.o, p.expected(out.o).o), 1e-6);
    for (const double x : out.dq) ASSERT_LT(std::abs(x), 1e-4);
    for (const double x : out.dk) ASSERT_LT(std::abs(x), 1e-4);
  }
}

// The bits of a document's results do not depend on the contents of other documents.
TEST_F(Rebased, DocumentsDoNotLeak) {
  RebasedCase c;
  c.documents = {70, 65, 330};
  for (const bool quadratic : {true, false}) {
    const Problem p(gpu(), c, 0);
    const Outputs before = p.run(quadratic);
    ops::run(gpu(), ops::Fill{.x = p.qkv().tensor().row_range(70, 65), .value = 3.0f});
    const Outputs after = p.run(quadratic);
    const auto part = [&](const std::vector<double>& x, int64_t first, int64_t count) {
      const int64_t cols = static_cast<int64_t>(x.size()) / c.tokens();
      return std::vector<double>(x.begin() + first * cols, x.begin() + (first + count) * cols);
    };
    for (const auto& [first, count] : {std::pair{0, 70}, std::pair{135, 330}}) {
      EXPECT_EQ(part(before.o, first, count), part(after.o, first, count));
      EXPECT_EQ(part(before.dq, first, count), part(after.dq, first, count));
      EXPECT_EQ(part(before.dk, first, count), part(after.dk, first, count));
      EXPECT_EQ(part(before.dv, first, count), part(after.dv, first, count));
    }
    EXPECT_NE(part(before.o, 70, 65), part(after.o, 70, 65));
  }
}

// The state of any prefix and single steps after it give the outputs of the whole document.
TEST_F(Rebased, DecodesFromAState) {
  struct Shape {
    int heads;
    int64_t f, e;
  };
  for (const Shape& shape : {Shape{3, 16, 12}, Shape{2, 16, 64}, Shape{1, 32, 128}}) {
    for (const bool rebased : {false, true}) {
      RebasedCase c;
      c.documents = {300};
      c.rebased = rebased;
      c.heads = shape.heads;
      c.f = shape.f;
      c.e = shape.e;
      c.mean = 0.5;
      const Problem p(gpu(), c, 4);
      const std::vector<double> o = p.run(true).o;
      const RebasedResult expected = p.expected(o);
      const int64_t rows = c.heads * ops::rebased_state_rows(c.f, c.params());
      for (const int32_t prompt : {0, 1, 128, 290}) {
        const OnGpu state(gpu(), kF32, {2, rows, c.e + 1});
        for (int64_t b = 0; b < 2 && prompt > 0; ++b) {
          ops::run(gpu(), ops::RebasedState{
                              .state_Re = state.tensor().row_range(b, 1).reshaped({rows, c.e + 1}),
                              .k_THf = p.k(p.qkv()).row_range(0, prompt),
                              .v_THe = p.v(p.qkv()).row_range(0, prompt),
                              .params = c.params()});
        }
        for (int32_t t = prompt; t < prompt + 10; ++t) {
          const OnGpu out(gpu(), kBF16, {2, c.heads * c.e}, 4);
          const OnGpu rows_gpu(gpu(), kBF16, {2, p.width()}, 8);
          ops::run(gpu(), ops::Copy{.y = rows_gpu.tensor().row_range(0, 1),
                                    .x = p.qkv().tensor().row_range(t, 1)});
          ops::run(gpu(), ops::Copy{.y = rows_gpu.tensor().row_range(1, 1),
                                    .x = p.qkv().tensor().row_range(t, 1)});
          const OnGpu position(gpu(), test::integers({t, t}), kI32);
          ops::run(gpu(), ops::RebasedDecode{.o_BHe = out,
                                             .q_BHf = p.q(rows_gpu),
                                             .k_BHf = p.k(rows_gpu),
                                             .v_BHe = p.v(rows_gpu),
                                             .state_BRe = state,
                                             .positions_B = position,
                                             .params = c.params()});
          const int64_t cols = c.heads * c.e;
          std::vector<double> both;
          for (int b = 0; b < 2; ++b) {
            both.insert(both.end(), expected.o.begin() + t * cols,
                        expected.o.begin() + (t + 1) * cols);
          }
          EXPECT_LE(test::relative_error(out.values(), both), test::kBf16Error)
              << "prompt " << prompt << ", token " << t;
          EXPECT_TRUE(out.gaps_intact());
        }
      }
    }
  }
}

TEST_F(Rebased, HeadsThatDoNotFitAreConfigurationErrors) {
  for (const auto& [f, e] : {std::pair{33, 16}, std::pair{16, 129}}) {
    RebasedCase c;
    c.f = f;
    c.e = e;
    const Problem p(gpu(), c, 0);
    try {
      p.run(false);
      ADD_FAILURE() << "f " << f << ", e " << e;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig) << error.what();
    }
  }
}

}  // namespace
}  // namespace sbtrain::rebased_test
