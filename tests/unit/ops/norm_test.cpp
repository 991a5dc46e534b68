#include "ops/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::CpuStream;
using test::Owned;
using Values = std::vector<double>;

constexpr double kEps = 1e-5;

// ---- References in fp64, on one row each ------------------------------------------------------

Values rmsnorm_row(const Values& x, const Values& w) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double r = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
  Values y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * r * w[i];
  return y;
}

Values layernorm_row(const Values& x, const Values& w, const Values& b) {
  const auto n = static_cast<double>(x.size());
  double mean = 0;
  for (const double v : x) mean += v / n;
  double variance = 0;
  for (const double v : x) variance += (v - mean) * (v - mean) / n;
  Values y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - mean) / std::sqrt(variance + kEps) * w[i] + b[i];
  }
  return y;
}

Values slice(const Values& v, int64_t begin, int64_t count) {
  return {v.begin() + begin, v.begin() + begin + count};
}

void append(Values& to, const Values& from) {
  to.insert(to.end(), from.begin(), from.end());
}

Values rmsnorm_rows(const Values& x, const Values& w) {
  const auto width = static_cast<int64_t>(w.size());
  Values y;
  for (int64_t t = 0; t < static_cast<int64_t>(x.size()); t += width) {
    append(y, rmsnorm_row(slice(x, t, width), w));
  }
  return y;
}

Values head_norm_rows(const Values& x, const Values& w, const Values& b, int64_t head_dim) {
  const auto cols = static_cast<int64_t>(w.size());
  Values y;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()); i += head_dim) {
    append(y, layernorm_row(slice(x, i, head_dim), slice(w, i % cols, head_dim),
                            slice(b, i % cols, head_dim)));
  }
  return y;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// ---- RMSNorm ----------------------------------------------------------------------------------

TEST(RmsNorm, MatchesReference) {
  CpuStream s;
  for (const int64_t tokens : {1, 5, 67, 300}) {
    for (const int64_t width : {1, 3, 17, 128, 1031}) {
      const Owned x = test::random_normal("x", {tokens, width}, 3, 1, 2);
      const Owned w = test::random_normal("w", {width}, 0.2, 1);
      const Owned y = test::poisoned({tokens, width}, 5);
      ops::run(s, ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = w, .eps = kEps});
      EXPECT_LE(test::relative_error(y, rmsnorm_rows(test::to_f64(x), test::to_f64(w))), 1e-6);
      EXPECT_TRUE(y.gaps_intact());
    }
  }
}

TEST(RmsNorm, ZeroRowsStayZero) {
  CpuStream s;
  const Owned x = test::constant({2, 8}, 0);
  const Owned y = test::poisoned({2, 8});
  ops::run(s, ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = test::constant({8}, 1), .eps = kEps});
  EXPECT_EQ(test::to_f64(y), Values(16, 0.0));
}

TEST(RmsNormBackward, MatchesFiniteDifferences) {
  CpuStream s;
  for (const auto& [tokens, width] : {std::pair{1, 1}, {3, 7}, {37, 9}, {2, 130}}) {
    const Owned x = test::random_normal("x", {tokens, width}, 1, 0.5, 1);
    const Owned w = test::random_normal("w", {width}, 0.2, 1);
    const Owned dy = test::random_normal("dy", {tokens, width}, 1, 0, 4);
    const Owned dx = test::random_normal("dx", {tokens, width}, 1, 0, 3);
    const Owned dw = test::random_normal("dw", {width});
    const Values X = test::to_f64(x);
    const Values W = test::to_f64(w);
    const Values G = test::to_f64(dy);
    const Values expected_dx = test::plus(
        test::to_f64(dx),
        test::numeric_gradient([&](const Values& v) { return dot(G, rmsnorm_rows(v, W)); }, X));
    const Values expected_dw = test::plus(
        test::to_f64(dw),
        test::numeric_gradient([&](const Values& v) { return dot(G, rmsnorm_rows(X, v)); }, W));
    ops::run(s, ops::RmsNormBackward{
                    .dx_TD = dx, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w, .eps = kEps});
    EXPECT_LE(test::relative_error(dx, expected_dx), 5e-6);
    EXPECT_LE(test::relative_error(dw, expected_dw), 1e-6);
    EXPECT_TRUE(dx.gaps_intact());
  }
}

TEST(RmsNormBackward, FindsTheLargestGradient) {
  CpuStream s;
  const Owned x = test::random_normal("x", {37, 24}), dy = test::random_normal("dy", {37, 24});
  const Owned w = test::random_normal("w", {24}, 0.2, 1);
  const Owned dx = test::random_normal("dx", {37, 24}, 1, 0, 3), dw = test::constant({24}, 0);
  const Owned amax = test::poisoned({1});
  ops::run(
      s,
      ops::RmsNormBackward{
          .dx_TD = dx, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w, .eps = kEps, .amax_1 = amax});
  double largest = 0;
  for (const double value : test::to_f64(dx)) largest = std::max(largest, std::fabs(value));
  EXPECT_EQ(*amax.f32(), largest);
}

TEST(RmsNormBackward, SameBitsOnEveryRun) {
  CpuStream s;
  const Owned x = test::random_normal("x", {500, 128});
  const Owned w = test::random_normal("w", {128});
  const Owned dy = test::random_normal("dy", {500, 128});
  const Owned dx1 = test::constant({500, 128}, 0);
  const Owned dw1 = test::constant({128}, 0);
  ops::run(s, ops::RmsNormBackward{
                  .dx_TD = dx1, .dw_D = dw1, .dy_TD = dy, .x_TD = x, .w_D = w, .eps = kEps});
  for (int run = 0; run < 5; ++run) {
    const Owned dx2 = test::constant({500, 128}, 0);
    const bool fresh = run % 2 == 1;  // then what dw holds does not count
    const Owned dw2 = fresh ? test::poisoned({128}) : test::constant({128}, 0);
    ops::run(s, ops::RmsNormBackward{.dx_TD = dx2,
                                     .dw_D = dw2,
                                     .dy_TD = dy,
                                     .x_TD = x,
                                     .w_D = w,
                                     .eps = kEps,
                                     .accumulate_dw = !fresh});
    EXPECT_TRUE(test::bitwise_equal(dx1, dx2));
    EXPECT_TRUE(test::bitwise_equal(dw1, dw2));
  }
}

// ---- Head norm --------------------------------------------------------------------------------

TEST(HeadNorm, MatchesReference) {
  CpuStream s;
  for (const int64_t tokens : {1, 5, 200}) {
    for (const int heads : {1, 3, 8}) {
      for (const int64_t head_dim : {2, 5, 32, 64}) {
        const int64_t cols = heads * head_dim;
        const Owned x = test::random_normal("x", {tokens, cols}, 2, 1, 2);
        const Owned w = test::random_normal("w", {heads, head_dim}, 0.2, 1);
        const Owned b = test::random_normal("b", {heads, head_dim});
        const Owned y = test::poisoned({tokens, cols}, 1);
        ops::run(s, ops::HeadNorm{.y_THd = y,
                                  .x_THd = x,
                                  .w_Hd = w.tensor().reshaped({cols}),
                                  .b_Hd = b.tensor().reshaped({cols}),
                                  .heads = heads,
                                  .eps = kEps});
        const Values expected =
            head_norm_rows(test::to_f64(x), test::to_f64(w), test::to_f64(b), head_dim);
        // A few channels that are nearly equal have a small variance, compared with which the
        // rounding of their mean is large. So single elements are less exact than the whole.
        const test::RelativeErrors errors = test::relative_errors(test::to_f64(y), expected);
        EXPECT_LE(errors.frobenius, 1e-6);
        EXPECT_LE(errors.largest, 1e-5);
        EXPECT_TRUE(y.gaps_intact());
      }
    }
  }
}

TEST(HeadNormBackward, MatchesFiniteDifferences) {
  CpuStream s;
  struct Shape {
    int64_t tokens;
    int heads;
    int64_t head_dim;
  };
  for (const Shape shape : {Shape{1, 1, 2}, {3, 2, 5}, {35, 3, 4}, {2, 2, 33}}) {
    const int64_t tokens = shape.tokens;
    const int64_t head_dim = shape.head_dim;
    const int64_t cols = shape.heads * head_dim;
    const Owned x = test::random_normal("x", {tokens, cols}, 1, 0.5, 1);
    const Owned w = test::random_normal("w", {cols}, 0.2, 1);
    const Owned dy = test::random_normal("dy", {tokens, cols}, 1, 0, 4);
    const Owned dx = test::poisoned({tokens, cols}, 3);
    const Owned dw = test::random_normal("dw", {cols});
    const Owned db = test::random_normal("db", {cols});
    const Values X = test::to_f64(x);
    const Values W = test::to_f64(w);
    const Values B(static_cast<size_t>(cols), 0.3);
    const Values G = test::to_f64(dy);
    const auto norm = [&](const Values& a, const Values& b, const Values& c) {
      return dot(G, head_norm_rows(a, b, c, head_dim));
    };
    const Values expected_dx =
        test::numeric_gradient([&](const Values& v) { return norm(v, W, B); }, X);
    const Values expected_dw =
        test::plus(test::to_f64(dw),
                   test::numeric_gradient([&](const Values& v) { return norm(X, v, B); }, W));
    const Values expected_db =
        test::plus(test::to_f64(db),
                   test::numeric_gradient([&](const Values& v) { return norm(X, W, v); }, B));
    ops::run(s, ops::HeadNormBackward{.dx_THd = dx,
                                      .dw_Hd = dw,
                                      .db_Hd = db,
                                      .dy_THd = dy,
                                      .x_THd = x,
                                      .w_Hd = w,
                                      .heads = shape.heads,
                                      .eps = kEps});
    // With two channels the normalised values are +-1 for any x, and dx cancels completely.
    if (head_dim > 2) {
      EXPECT_LE(test::relative_error(dx, expected_dx), 5e-6);
    }
    EXPECT_LE(test::relative_error(dw, expected_dw), 1e-6);
    EXPECT_LE(test::relative_error(db, expected_db), 1e-6);
    EXPECT_TRUE(dx.gaps_intact());
  }
}

// ---- RMSNorm of heads -------------------------------------------------------------------------

struct RmsShape {
  int64_t tokens;
  int heads;
  int64_t head_dim;
};
constexpr RmsShape kRmsShapes[] = {{1, 1, 1},    {3, 2, 5},  {35, 3, 4},  {2, 2, 33},
                                   {40, 1, 256}, {9, 1, 24}, {3, 1, 2000}};

TEST(HeadRmsNorm, MatchesFp64) {
  for (const RmsShape& shape : kRmsShapes) {
    CpuStream s;
    const int64_t cols = shape.heads * shape.head_dim;
    const Owned x = test::random_normal("x", {shape.tokens, cols}, 3, 1, 2);
    const Owned w = test::random_normal("w", {shape.head_dim}, 0.2, 1);
    const Owned y = test::poisoned({shape.tokens, cols}, 1);
    ops::run(s,
             ops::HeadRmsNorm{.y_THd = y, .x_THd = x, .w_d = w, .heads = shape.heads, .eps = kEps});
    EXPECT_LE(test::relative_error(y, rmsnorm_rows(test::to_f64(x), test::to_f64(w))), 1e-6);
    EXPECT_TRUE(y.gaps_intact());
  }
}

TEST(HeadRmsNormBackward, MatchesFiniteDifferencesAndWorksInPlace) {
  for (const RmsShape& shape : kRmsShapes) {
    if (shape.head_dim > 100) continue;  // many differences, nothing new
    CpuStream s;
    const int64_t cols = shape.heads * shape.head_dim;
    const Owned x = test::random_normal("x", {shape.tokens, cols}, 1, 0.5, 1);
    const Owned w = test::random_normal("w", {shape.head_dim}, 0.2, 1);
    const Owned dx = test::random_normal("dy", {shape.tokens, cols}, 1, 0, 4);
    const Owned dw = test::random_normal("dw", {shape.head_dim});
    const Values X = test::to_f64(x);
    const Values W = test::to_f64(w);
    const Values G = test::to_f64(dx);
    const auto norm = [&](const Values& a, const Values& b) { return dot(G, rmsnorm_rows(a, b)); };
    const Values expected_dx =
        test::numeric_gradient([&](const Values& v) { return norm(v, W); }, X);
    const Values expected_dw = test::plus(
        test::to_f64(dw), test::numeric_gradient([&](const Values& v) { return norm(X, v); }, W));
    ops::run(s, ops::HeadRmsNormBackward{.dx_THd = dx,
                                         .dw_d = dw,
                                         .dy_THd = dx,
                                         .x_THd = x,
                                         .w_d = w,
                                         .heads = shape.heads,
                                         .eps = kEps});
    // One channel is +-1 after its norm, whatever x is, and dx cancels.
    if (shape.head_dim > 1) {
      EXPECT_LE(test::relative_error(dx, expected_dx), 5e-6);
    }
    EXPECT_LE(test::relative_error(dw, expected_dw), 1e-6);
    EXPECT_TRUE(dx.gaps_intact());
  }
}

}  // namespace
}  // namespace sbtrain
