#include "ops/linear.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>

#include "ops/cpu/blas.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using ops::cpu::Transpose;
using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

struct Shape {
  int64_t tokens, out, in;
};
// Odd sizes, single rows and columns, and sizes that several threads share.
constexpr Shape kShapes[] = {{1, 1, 1},    {1, 7, 5},      {3, 1, 9},     {5, 33, 17},
                             {64, 64, 64}, {129, 130, 67}, {1, 512, 256}, {257, 384, 131}};

// alpha a b^T, with a [m, k] and b [n, k].
Values product(const Values& a, const Values& b, int64_t m, int64_t n, int64_t k, double alpha) {
  Values c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[static_cast<size_t>(i * k + l)] * b[static_cast<size_t>(j * k + l)];
      }
      c[static_cast<size_t>(i * n + j)] = alpha * sum;
    }
  }
  return c;
}

Values transposed(const Values& a, int64_t rows, int64_t cols) {
  Values out(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      out[static_cast<size_t>(j * rows + i)] = a[static_cast<size_t>(i * cols + j)];
    }
  }
  return out;
}

TEST(Linear, MatchesReference) {
  CpuStream s;
  for (const auto& [tokens, out, in] : kShapes) {
    const Owned x = test::random_normal("x", {tokens, in}, 1, 0, 3);
    const Owned w = test::random_normal("w", {out, in});
    const Owned y = test::poisoned({tokens, out}, 2);
    ops::run(s, ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w, .alpha = 0.5f});
    const Values expected = product(test::to_f64(x), test::to_f64(w), tokens, out, in, 0.5);
    EXPECT_LE(test::relative_error(y, expected), 1e-6);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(Linear, AddsTheResidualWhereverItLies) {
  CpuStream s;
  for (const auto& [tokens, out, in] : kShapes) {
    const Owned x = test::random_normal("x", {tokens, in});
    const Owned w = test::random_normal("w", {out, in});
    const Owned residual = test::random_normal("residual", {tokens, out}, 1, 0, 1);
    const Values expected = test::plus(
        product(test::to_f64(x), test::to_f64(w), tokens, out, in, 0.5), test::to_f64(residual));
    const Owned y = test::poisoned({tokens, out}, 2);
    ops::run(s, ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w, .alpha = 0.5f, .residual = residual});
    EXPECT_LE(test::relative_error(y, expected), 1e-6);
    EXPECT_TRUE(y.gaps_intact());
    ops::run(s, ops::Linear{.y_TN = residual,
                            .x_TK = x,
                            .w_NK = w,
                            .alpha = 0.5f,
                            .residual = residual});  // in place
    EXPECT_LE(test::relative_error(residual, expected), 1e-6);
  }
}

TEST(LinearBackward, MatchesReference) {
  CpuStream s;
  for (const auto& [tokens, out, in] : kShapes) {
    const Owned x = test::random_normal("x", {tokens, in}, 1, 0, 3);
    const Owned w = test::random_normal("w", {out, in});
    const Owned dy = test::random_normal("dy", {tokens, out}, 1, 0, 1);
    const Values dx_reference =
        product(test::to_f64(dy), transposed(test::to_f64(w), out, in), tokens, in, out, 0.5);
    const Owned dx = test::poisoned({tokens, in}, 2);
    ops::run(s, ops::LinearBackward{.dx_TK = dx, .dy_TN = dy, .w_NK = w, .alpha = 0.5f});
    EXPECT_LE(test::relative_error(dx, dx_reference), 1e-6);
    ops::run(s, ops::LinearBackward{
                    .dx_TK = dx, .dy_TN = dy, .w_NK = w, .alpha = 0.5f, .accumulate_dx = true});
    EXPECT_LE(test::relative_error(dx, test::plus(dx_reference, dx_reference)), 1e-6);
    EXPECT_TRUE(dx.gaps_intact());

    const Owned dw = test::random_normal("dw", {out, in});
    const Values dw_reference = test::plus(
        test::to_f64(dw), product(transposed(test::to_f64(dy), tokens, out),
                                  transposed(test::to_f64(x), tokens, in), out, in, tokens, 0.5));
    ops::run(s, ops::LinearBackward{.dw_NK = dw, .dy_TN = dy, .x_TK = x, .alpha = 0.5f});
    EXPECT_LE(test::relative_error(dw, dw_reference), 1e-6);

    const Owned fresh = test::poisoned({out, in}, 2);
    ops::run(s, ops::LinearBackward{
                    .dw_NK = fresh, .dy_TN = dy, .x_TK = x, .alpha = 0.5f, .accumulate_dw = false});
    EXPECT_LE(test::relative_error(
                  fresh, product(transposed(test::to_f64(dy), tokens, out),
                                 transposed(test::to_f64(x), tokens, in), out, in, tokens, 0.5)),
              1e-6);
    EXPECT_TRUE(fresh.gaps_intact());
  }
}

TEST(LinearBackward, MatchesFiniteDifferences) {
  CpuStream s;
  constexpr int64_t kTokens = 5;
  constexpr int64_t kOut = 4;
  constexpr int64_t kIn = 7;
  const Owned x = test::random_normal("x", {kTokens, kIn});
  const Owned w = test::random_normal("w", {kOut, kIn});
  const Owned dy = test::random_normal("dy", {kTokens, kOut});
  const Values G = test::to_f64(dy);
  const auto objective = [&](const Values& a, const Values& b) {
    const Values y = product(a, b, kTokens, kOut, kIn, 0.5);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * G[i];
    return sum;
  };
  const Values X = test::to_f64(x);
  const Values W = test::to_f64(w);
  const Owned dx = test::poisoned({kTokens, kIn});
  const Owned dw = test::constant({kOut, kIn}, 0);
  ops::run(s, ops::LinearBackward{.dx_TK = dx, .dy_TN = dy, .w_NK = w, .alpha = 0.5f});
  ops::run(s, ops::LinearBackward{.dw_NK = dw, .dy_TN = dy, .x_TK = x, .alpha = 0.5f});
  const auto by_x = [&](const Values& v) { return objective(v, W); };
  const auto by_w = [&](const Values& v) { return objective(X, v); };
  EXPECT_LE(test::relative_error(dx, test::numeric_gradient(by_x, X)), 1e-6);
  EXPECT_LE(test::relative_error(dw, test::numeric_gradient(by_w, W)), 1e-6);
}

TEST(BiasBackward, AddsColumnSums) {
  CpuStream s;
  for (const auto& [tokens, cols] : {std::pair{1, 1}, {3, 5}, {31, 4}, {1000, 70}}) {
    const Owned dy = test::random_normal("dy", {tokens, cols}, 1, 0.5, 1);
    const Owned db = test::random_normal("db", {cols});
    Values expected = test::to_f64(db);
    const Values G = test::to_f64(dy);
    for (size_t i = 0; i < G.size(); ++i) expected[i % static_cast<size_t>(cols)] += G[i];
    ops::run(s, ops::BiasBackward{.db_N = db, .dy_TN = dy});
    EXPECT_LE(test::relative_error(db, expected), 1e-6);
  }
}

// Every combination of transposes, split for every number of threads.
TEST(Gemm, EveryTransposeAndThreadCount) {
  constexpr int64_t kM = 150;
  constexpr int64_t kN = 203;
  constexpr int64_t kK = 65;
  const Owned a = test::random_normal("a", {kM, kK});
  const Owned b = test::random_normal("b", {kN, kK});
  const Values expected = product(test::to_f64(a), test::to_f64(b), kM, kN, kK, 2.0);
  const auto flipped = [](const Owned& x) {
    const Values values = transposed(test::to_f64(x), x.tensor().rows(), x.tensor().cols());
    return test::generated({x.tensor().cols(), x.tensor().rows()}, 0,
                           [&](int64_t i) { return values[static_cast<size_t>(i)]; });
  };
  const Owned a_t = flipped(a);
  const Owned b_t = flipped(b);
  const int threads_before = omp_get_max_threads();
  for (const int threads : {1, 2, 3, 7, 16}) {
    omp_set_num_threads(threads);
    for (const bool flip_a : {false, true}) {
      for (const bool flip_b : {false, true}) {
        const Tensor& A = flip_a ? a_t : a;
        const Tensor& B = flip_b ? b : b_t;
        const Owned c = test::poisoned({kM, kN}, 9);
        ops::cpu::gemm(flip_a ? Transpose::kYes : Transpose::kNo,
                       flip_b ? Transpose::kYes : Transpose::kNo, kM, kN, kK, 2.0f, A.f32(),
                       A.row_stride, B.f32(), B.row_stride, 0.0f, c.f32(), kN + 9);
        EXPECT_LE(test::relative_error(c, expected), 1e-6) << threads << " threads";
        EXPECT_TRUE(c.gaps_intact());
      }
    }
  }
  omp_set_num_threads(threads_before);
}

TEST(Gemm, SerialProductsRunInsideParallelRegions) {
  constexpr int64_t kSize = 96;
  const Owned a = test::random_normal("a", {kSize, kSize});
  const Owned b = test::random_normal("b", {kSize, kSize});
  const Values expected = product(test::to_f64(a), test::to_f64(b), kSize, kSize, kSize, 1.0);
  std::vector<Owned> c(16, test::poisoned({kSize, kSize}));
#pragma omp parallel for
  for (int i = 0; i < 16; ++i) {
    ops::cpu::gemm_serial(Transpose::kNo, Transpose::kYes, kSize, kSize, kSize, 1.0f, a.f32(),
                          kSize, b.f32(), kSize, 0.0f, c[static_cast<size_t>(i)].f32(), kSize);
  }
  for (const Owned& out : c) {
    EXPECT_LE(test::relative_error(out, expected), 1e-6);
    EXPECT_TRUE(test::bitwise_equal(out, c[0]));
  }
}

TEST(Linear, SameBitsOnEveryRun) {
  CpuStream s;
  const Owned x = test::random_normal("x", {301, 130});
  const Owned w = test::random_normal("w", {250, 130});
  const Owned first = test::poisoned({301, 250});
  ops::run(s, ops::Linear{.y_TN = first, .x_TK = x, .w_NK = w});
  for (int run = 0; run < 10; ++run) {
    const Owned y = test::poisoned({301, 250});
    ops::run(s, ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w});
    EXPECT_TRUE(test::bitwise_equal(y, first));
  }
}

// What decoding relies on: a row's bits depend neither on the other rows nor on the threads.
TEST(Linear, FewRowsDoNotDependOnEachOther) {
  CpuStream s;
  const int threads_before = omp_get_max_threads();
  for (const Shape& shape : {Shape{64, 33, 17}, Shape{64, 700, 131}, Shape{37, 4100, 128}}) {
    const Owned x = test::random_normal("x", {shape.tokens, shape.in});
    const Owned w = test::random_normal("w", {shape.out, shape.in});
    const Owned together = test::poisoned({shape.tokens, shape.out});
    omp_set_num_threads(3);
    ops::run(s, ops::Linear{.y_TN = together, .x_TK = x, .w_NK = w, .alpha = 0.5f});
    omp_set_num_threads(1);
    for (int64_t first = 0; first < shape.tokens;) {
      const int64_t rows = std::min(shape.tokens - first, 1 + first % 6);
      const Owned y = test::poisoned({rows, shape.out});
      ops::run(s,
               ops::Linear{
                   .y_TN = y, .x_TK = x.tensor().row_range(first, rows), .w_NK = w, .alpha = 0.5f});
      EXPECT_EQ(test::to_f64(y), test::to_f64(together.tensor().row_range(first, rows))) << first;
      first += rows;
    }
  }
  omp_set_num_threads(threads_before);
}

}  // namespace
}  // namespace sbtrain
