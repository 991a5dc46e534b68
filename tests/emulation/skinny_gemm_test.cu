// The kernel of products of few rows, emulated (emulator.h), against products in double precision.
// That a row's bits do not depend on the other rows is a property of the order of the sums, which
// the emulated products have as well.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/gemv.cu"
#include "kernels/skinny_gemm.cu"
#include "kernels/skinny_gemm_wide.cu"
#include "support/tensors.h"

namespace sbtrain::emulation {
namespace {

using kernels::bf16;

constexpr float kEps = 1e-2f;
constexpr float kAlpha = 0.25f;

struct Case {
  int64_t outputs, channels;
  bool norm, swiglu, residual;
};

std::vector<bf16> random_bf16(const char* name, int64_t count) {
  const test::Owned x = test::random_normal(name, {count});
  std::vector<bf16> rounded;
  for (int64_t i = 0; i < count; ++i) rounded.push_back(__float2bfloat16_rn(x.f32()[i]));
  return rounded;
}
double value(bf16 x) {
  return double{__bfloat162float(x)};
}

class SkinnyGemm {
 public:
  SkinnyGemm(const Case& c, int64_t rows)
      : c_(c),
        rows_(rows),
        x_(random_bf16("x", rows * c.channels)),
        w_(random_bf16("w", (c.swiglu ? 2 : 1) * c.outputs * c.channels)),
        norm_(random_bf16("norm", c.channels)),
        normed_(x_.size()),
        residual_(static_cast<size_t>(rows * c.outputs)) {
    for (size_t i = 0; i < residual_.size(); ++i) residual_[i] = float(i % 7);
  }
  // Of the last `rows` rows.
  std::vector<float> run(int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * c_.outputs), NAN);
    const int64_t first = rows_ - rows;
    kernels::skinny_gemm(
        nullptr,
        {.type = kernels::Type::kF32,
         .y = {y.data(), c_.outputs},
         .x = {x_.data() + first * c_.channels, c_.channels},
         .w = {w_.data(), c_.channels},
         .residual = {c_.residual ? residual_.data() + first * c_.outputs : nullptr, c_.outputs},
         .rows = rows,
         .n = c_.outputs,
         .k = c_.channels,
         .alpha = kAlpha,
         .early = false,
         .norm_w = c_.norm ? norm_.data() : nullptr,
         .norm_eps = kEps,
         .normed = {normed_.data(), c_.channels},
         .swiglu = c_.swiglu});
    return y;
  }
  std::vector<double> expected() const {
    std::vector<double> y;
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t n = 0; n < c_.outputs; ++n) {
        const double first = product(row, n);
        if (c_.swiglu) {
          y.push_back(first / (1 + std::exp(-first)) * product(row, c_.outputs + n));
        } else {
          y.push_back(first + (c_.residual ? double(residual_[y.size()]) : 0.0));
        }
      }
    }
    return y;
  }

 private:
  // Of x after its norm, rounded to bf16 as the kernel does.
  double product(int64_t row, int64_t n) const {
    double squares = 0;
    for (int64_t k = 0; k < c_.channels; ++k) {
      const double x = value(x_[size_t(row * c_.channels + k)]);
      squares += x * x;
    }
    const double factor = 1 / std::sqrt(squares / double(c_.channels) + double(kEps));
    double sum = 0;
    for (int64_t k = 0; k < c_.channels; ++k) {
      double x = value(x_[size_t(row * c_.channels + k)]);
      if (c_.norm) {
        x = value(__float2bfloat16_rn(static_cast<float>(x * factor * value(norm_[size_t(k)]))));
      }
      sum += x * value(w_[size_t(n * c_.channels + k)]);
    }
    return double(kAlpha) * sum;
  }

  Case c_;
  int64_t rows_;
  std::vector<bf16> x_, w_, norm_, normed_;
  std::vector<float> residual_;
};

// Channels that end within a vector, a chunk, a stage, and a warp's share; more stages than fit at
// once; outputs that end within a tile; enough outputs for two, three and four tiles in a block.
constexpr Case kCases[] = {
    {1, 1, true, false, true},       {21, 299, true, true, false},  {37, 96, false, false, true},
    {20, 1536, true, true, false},   {16, 2752, true, false, true}, {24, 4096, false, false, true},
    {16, 14336, true, false, false}, {3080, 64, true, true, false}, {7040, 128, true, false, true},
    {1540, 192, false, true, false}, {6150, 64, false, false, true}};

TEST(EmulatedSkinnyGemm, MatchProductsInDoublePrecision) {
  for (const Case& c : kCases) {
    for (const int64_t rows : {1, 7, 9, 20, 33}) {
      if (rows > 1 && rows < 33 && c.outputs > 1000) continue;  // takes long
      SkinnyGemm products(c, rows);
      const std::vector<float> y = products.run(rows);
      EXPECT_LE(test::relative_error({y.begin(), y.end()}, products.expected()),
                c.norm ? 2e-4 : 1e-5)
          << rows << " rows, " << c.outputs << " outputs of " << c.channels << " channels";
    }
  }
}

TEST(EmulatedSkinnyGemm, BitsDoNotDependOnTheOtherRows) {
  for (const Case& c : kCases) {
    if (c.outputs > 1000) continue;
    SkinnyGemm products(c, 64);
    const std::vector<float> all = products.run(64);
    for (const int64_t rows : {1, 8, 13, 32}) {
      const std::vector<float> mine(all.end() - rows * c.outputs, all.end());
      EXPECT_EQ(products.run(rows), mine) << rows << " rows of " << c.channels << " channels";
    }
  }
}

}  // namespace
}  // namespace sbtrain::emulation
