// Muon against its formulas in double precision, and the orthogonalisation by its singular values.
#include "ops/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/memory.h"
#include "optim/optimizer.h"
#include "support/tensors.h"

namespace sbtrain::test {
namespace {

using Matrix = std::vector<double>;

Matrix product(const Matrix& a, const Matrix& b, int64_t m, int64_t k, int64_t n) {
  Matrix c(static_cast<size_t>(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      for (int64_t l = 0; l < n; ++l) c[i * n + l] += a[i * k + j] * b[j * n + l];
    }
  }
  return c;
}
Matrix transposed(const Matrix& a, int64_t m, int64_t n) {
  Matrix t(a.size());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) t[j * m + i] = a[i * n + j];
  }
  return t;
}

// ops::Orthogonalize in double precision.
Matrix orthogonalized(Matrix x, int64_t rows, int64_t cols) {
  const bool tall = rows > cols;
  if (tall) {
    x = transposed(x, rows, cols);
    std::swap(rows, cols);
  }
  double square = 0;
  for (const double value : x) square += value * value;
  for (double& value : x) value /= double{ops::Orthogonalize::kMargin} * std::sqrt(square);
  for (const auto& [c1, c3, c5] : ops::Orthogonalize::kCoefficients) {
    const Matrix a = product(x, transposed(x, rows, cols), rows, cols, rows);
    Matrix b = product(a, a, rows, rows, rows);
    for (size_t i = 0; i < b.size(); ++i) b[i] = c5 * b[i] + c3 * a[i];
    const Matrix bx = product(b, x, rows, rows, cols);
    for (size_t i = 0; i < x.size(); ++i) x[i] = c1 * x[i] + bx[i];
  }
  return tall ? transposed(x, rows, cols) : x;
}

Owned random_matrix(int64_t rows, int64_t cols, std::string_view name) {
  Owned x(DType::kF32, {rows, cols});
  const Philox random(7, RandomPurpose::kTest, name);
  for (int64_t i = 0; i < rows * cols; ++i) x.f32()[i] = static_cast<float>(random.normal(i));
  return x;
}

double relative_error(const float* x, const Matrix& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (x[i] - expected[i]) * (x[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

TEST(Orthogonalize, IsThePolynomialOfTheMatrix) {
  CpuStream cpu;
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 9}, {9, 1}, {17, 17}, {20, 70}, {70, 20}}) {
    const Owned x = random_matrix(rows, cols, "x");
    const Matrix before(x.f32(), x.f32() + rows * cols);
    ops::run(cpu, ops::Orthogonalize{.x_NK = x});
    // The slopes of the polynomials, up to 17, multiply rounding errors.
    EXPECT_LE(relative_error(x.f32(), orthogonalized(before, rows, cols)), 4e-5)
        << rows << " x " << cols;
  }
}

// The last polynomial leaves singular values between 0.85 and 1.15, so that no element of
// X X^T - 1 is beyond 1.15^2 - 1. None of a random matrix with twice as many columns as rows is so
// small that five steps are too few.
TEST(Orthogonalize, BringsSingularValuesNearOne) {
  CpuStream cpu;
  constexpr int64_t kRows = 48, kCols = 96;
  const Owned x = random_matrix(kRows, kCols, "y");
  ops::run(cpu, ops::Orthogonalize{.x_NK = x});
  const Matrix y(x.f32(), x.f32() + kRows * kCols);
  const Matrix gram = product(y, transposed(y, kRows, kCols), kRows, kCols, kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kRows; ++j) {
      EXPECT_NEAR(gram[i * kRows + j], i == j ? 1 : 0, 0.33) << i << " " << j;
    }
  }
}

TEST(Orthogonalize, KeepsZeros) {
  CpuStream cpu;
  Owned x = random_matrix(12, 20, "z");
  for (int64_t j = 0; j < 20; ++j) x.at(11, j) = 0;  // padding, as inner widths have
  ops::run(cpu, ops::Orthogonalize{.x_NK = x});
  for (int64_t j = 0; j < 20; ++j) EXPECT_EQ(x.at(11, j), 0);
  ops::run(cpu, ops::Fill{.x = x, .value = 0});
  ops::run(cpu, ops::Orthogonalize{.x_NK = x});
  for (int64_t i = 0; i < 12 * 20; ++i) EXPECT_EQ(x.f32()[i], 0);
}

// A step of Muon on one matrix that is whole on this rank.
class MuonStep : public testing::Test {
 protected:
  static constexpr int64_t kRows = 12, kCols = 20;
  MuonStep() {
    spec.shape = {kRows, kCols};
    spec.role = ParamRole::kLinear;
    spec.decay = true;
    spec.heads = 6;
    spec.groups = 3;
    std::fill_n(stats.tensor().f64(), ops::kStepStats, 0.0);
    stats.tensor().f64()[ops::kApply] = 1;
    stats.tensor().f64()[ops::kGradScale] = 0.5;
  }
  std::shared_ptr<const Optimizer> muon(const std::string& qkv, bool nesterov = true) {
    ModuleOptions options;
    const OptimizerType& type = optimizer_registry().at("muon");
    Setter setter(qkv, nesterov);
    type.describe(setter, options);
    return type.make(options);
  }
  void step(const Optimizer& optimizer) {
    const UpdateInputs in{.stats = stats, .lr = 0.1f, .weight_decay = 0.3f};
    const auto flat = [](const Owned& x) { return x.tensor().reshaped({kRows * kCols}); };
    MatrixView view;
    view.weights = flat(w);
    view.gradient = flat(grad);
    view.states = {flat(m)};
    view.spec = &spec;
    view.travels = flat(travels);
    optimizer.direct(cpu, in, {&view, 1});
    optimizer.transform(cpu, spec, travels);
    optimizer.apply(cpu, in, {&view, 1});
  }

  // Sets the two options that the tests vary.
  class Setter : public Fields {
   public:
    Setter(std::string qkv, bool nesterov) : qkv_(std::move(qkv)), nesterov_(nesterov) {}
    using Fields::list;
    using Fields::section;
    void value(std::string_view key, const Member& member, const Rule&, std::string_view) override {
      if (key == "qkv_matrices") std::get<EnumMember>(member).set(qkv_);
      if (key == "nesterov") *std::get<bool*>(member) = nesterov_;
    }
    void section(std::string_view, const Describe&, std::string_view) override {}
    void list(std::string_view, ListMember&, const Rule&, std::string_view) override {}

   private:
    std::string qkv_;
    bool nesterov_;
  };

  CpuStream cpu;
  TensorSpec spec;
  Buffer stats =
      cpu.memory.allocate(MemoryClass::kOptimizer, "stats", DType::kF64, {ops::kStepStats});
  Owned w = random_matrix(kRows, kCols, "w");
  Owned grad = random_matrix(kRows, kCols, "grad");
  Owned m = random_matrix(kRows, kCols, "m");
  Owned travels{DType::kF32, {kRows, kCols}};
};

TEST_F(MuonStep, IsTheFormula) {
  for (const bool nesterov : {true, false}) {
    for (const auto& [qkv, count] :
         {std::pair<std::string, int64_t>{"whole", 1}, {"group", 3}, {"head", 6}}) {
      Matrix expected_m, expected_w(w.f32(), w.f32() + kRows * kCols), u;
      for (int64_t i = 0; i < kRows * kCols; ++i) {
        const double g = 0.5 * grad.f32()[i];
        expected_m.push_back(0.95 * m.f32()[i] + g);
        u.push_back(nesterov ? g + 0.95 * expected_m.back() : expected_m.back());
      }
      const int64_t rows = kRows / count;
      for (int64_t block = 0; block < count; ++block) {
        const int64_t first = block * rows * kCols;
        const Matrix o = orthogonalized(Matrix(u.begin() + first, u.begin() + first + rows * kCols),
                                        rows, kCols);
        for (int64_t i = 0; i < rows * kCols; ++i) {
          double& value = expected_w[first + i];
          value -= 0.1 * (0.2 * std::sqrt(20.0) * o[i] + 0.3 * value);
        }
      }
      step(*muon(qkv, nesterov));
      EXPECT_LE(relative_error(m.f32(), expected_m), 1e-6) << qkv;
      EXPECT_LE(relative_error(w.f32(), expected_w), 1e-5) << qkv;
    }
  }
}

TEST_F(MuonStep, ASkippedStepChangesNothing) {
  const std::vector<float> w_before(w.f32(), w.f32() + kRows * kCols);
  const std::vector<float> m_before(m.f32(), m.f32() + kRows * kCols);
  stats.tensor().f64()[ops::kApply] = 0;
  grad.f32()[5] = std::numeric_limits<float>::quiet_NaN();
  step(*muon("whole"));
  EXPECT_EQ(std::vector<float>(w.f32(), w.f32() + kRows * kCols), w_before);
  EXPECT_EQ(std::vector<float>(m.f32(), m.f32() + kRows * kCols), m_before);
}

TEST_F(MuonStep, TakesTheMatricesOfLayersAlone) {
  const auto optimizer = muon("whole");
  EXPECT_TRUE(optimizer->takes_matrix(spec));
  EXPECT_EQ(optimizer->states(spec), std::vector<std::string>{"muon_m"});
  for (const ParamRole role : {ParamRole::kTable, ParamRole::kOther}) {
    spec.role = role;
    EXPECT_FALSE(optimizer->takes_matrix(spec));
    EXPECT_EQ(optimizer->states(spec), (std::vector<std::string>{"adam_m", "adam_v"}));
  }
}

}  // namespace
}  // namespace sbtrain::test
