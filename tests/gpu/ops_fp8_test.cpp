// Casts to fp8, bit by bit as on the CPU, and products against their emulation.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "gpu/op_test.h"
#include "ops/activation.h"
#include "ops/fp8.h"
#include "ops/memory.h"
#include "ops/norm.h"

namespace sbtrain::fp8_test {
namespace {

using test::OnGpu;
using test::Owned;

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};

// The bytes of a host tensor of fp8 without gaps.
std::vector<uint8_t> bytes(const Tensor& t) {
  return {t.fp8(), t.fp8() + t.numel()};
}

class Fp8 : public test::GpuOpTest {
 protected:
  void SetUp() override {
    test::GpuOpTest::SetUp();
    if (IsSkipped()) return;
    const int sm = present_target(Backend::kCuda).sm;
    if (sm < 89) GTEST_SKIP() << "fp8 products need compute capability 8.9; this GPU has " << sm;
  }

  // A matrix in fp8 on both backends.
  struct Both {
    Both(test::GpuStream& gpu, test::CpuStream& cpu, const Owned& x, DType x_type, DType dtype,
         int64_t gap = 0)
        : rows(x.tensor().rows()),
          cols(x.tensor().cols()),
          x_gpu(gpu, x, x_type, gap),
          y(dtype, {rows, cols}),
          y_t(dtype, {cols, rows}),
          y_gpu(gpu, dtype, {rows, cols}),
          y_t_gpu(gpu, dtype, {cols, rows}),
          amax_gpu(gpu, kF32, {1}),
          inverse_scale_gpu(gpu, kF32, {1}) {
      ops::run(gpu, ops::Amax{.amax_1 = amax_gpu, .x_RC = x_gpu});
      ops::run(gpu, ops::CastFp8{.y_RC = y_gpu,
                                 .y_CR = y_t_gpu,
                                 .inverse_scale_1 = inverse_scale_gpu,
                                 .x_RC = x_gpu,
                                 .amax_1 = amax_gpu});
      ops::run(cpu, ops::Amax{.amax_1 = amax, .x_RC = x});
      ops::run(
          cpu,
          ops::CastFp8{
              .y_RC = y, .y_CR = y_t, .inverse_scale_1 = inverse_scale, .x_RC = x, .amax_1 = amax});
    }
    int64_t rows, cols;
    OnGpu x_gpu;
    Owned y, y_t;
    OnGpu y_gpu, y_t_gpu, amax_gpu, inverse_scale_gpu;
    Owned amax = test::poisoned({1}), inverse_scale = test::poisoned({1});
  };
};

TEST_F(Fp8, CastsHaveTheBitsOfTheCpu) {
  for (const auto& [rows, cols, gap] : {test::RowCase{1, 1, 0},
                                        {5, 3, 1},
                                        {64, 64, 0},
                                        {67, 130, 3},
                                        {300, 128, 8},
                                        {1031, 257, 0},
                                        {4096, 1536, 16}}) {
    for (const DType dtype : kFormats) {
      for (const DType x_type : {kBF16, kF32}) {
        // A wide range: normal numbers, subnormal ones and zeros of the format.
        Owned x = test::random_normal("x", {rows, cols});
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            x.at(r, c) = std::ldexp(x.at(r, c), -static_cast<int>((r + c) % 24));
          }
        }
        if (x_type == kBF16) test::round_to_bf16(x);
        const Both both(gpu(), cpu, x, x_type, dtype, gap);
        EXPECT_EQ(both.amax_gpu.values(), test::to_f64(both.amax)) << rows << " x " << cols;
        EXPECT_EQ(both.inverse_scale_gpu.values(), test::to_f64(both.inverse_scale));
        EXPECT_TRUE(both.y_gpu.raw() == bytes(both.y)) << rows << " x " << cols;
        EXPECT_TRUE(both.y_t_gpu.raw() == bytes(both.y_t)) << rows << " x " << cols;
      }
    }
  }
}

TEST_F(Fp8, AmaxFindsWhatIsNotFinite) {
  for (const float bad : {NAN, HUGE_VALF}) {
    Owned x = test::random_bf16("x", {300, 128});
    x.at(299, 127) = bad;
    const OnGpu x_gpu(gpu(), x, kBF16), amax(gpu(), kF32, {1});
    ops::run(gpu(), ops::Amax{.amax_1 = amax, .x_RC = x_gpu});
    EXPECT_FALSE(std::isfinite(amax.values()[0]));
  }
}

// Products of fp8 are exact. Hopper's tensor cores align the 32 terms of an instruction to the
// largest and keep about 14 bits, so that each of the K / 32 additions to the accumulator errs by
// at most 2^-13 of it. Without fast accumulation it is added to f32 after at most 128 terms.
double accumulator_error(int64_t K, bool fast) {
  const int64_t additions = (fast ? K : std::min<int64_t>(K, 128)) / 32 + 1;
  return static_cast<double>(additions) * 0x1p-13;
}

TEST_F(Fp8, ProductsAreNearTheEmulation) {
  struct Size {
    int64_t M, N, K;
  };
  for (const auto& [M, N, K] :
       {Size{16, 16, 16}, {64, 48, 272}, {512, 1536, 1536}, {1024, 512, 4096}}) {
    for (const DType a_type : kFormats) {
      for (const bool adds : {false, true}) {
        for (const bool fast : {false, true}) {
          const DType y_type = fast ? kBF16 : kF32;
          const Both a(gpu(), cpu, test::random_bf16("a", {M, K}), kBF16, a_type);
          const Both b(gpu(), cpu, test::random_bf16("b", {N, K}, 0.02), kBF16, DType::kE4M3);
          const Owned y = test::random_bf16("y", {M, N});
          const OnGpu y_gpu(gpu(), y, y_type, 16);
          ops::Fp8Product op{.y_MN = y_gpu,
                             .a_MK = {a.y_gpu, a.inverse_scale_gpu},
                             .b_NK = {b.y_gpu, b.inverse_scale_gpu},
                             .alpha = 0.5f,
                             .residual = adds ? y_gpu.tensor() : Tensor(),
                             .fast_accumulation = fast};
          ops::run(gpu(), op);
          op.y_MN = y;
          op.a_MK = {a.y, a.inverse_scale};
          op.b_NK = {b.y, b.inverse_scale};
          if (adds) op.residual = y;
          ops::run(cpu, op);
          const double bound =
              (fast ? test::kBf16Error : test::kF32Error) + accumulator_error(K, fast);
          EXPECT_LE(test::relative_error(y_gpu, y), bound) << M << " x " << N << " x " << K;
          EXPECT_TRUE(y_gpu.gaps_intact());
        }
      }
    }
  }
}

TEST_F(Fp8, ProductsHaveTheSameBitsOnEveryRun) {
  const Both a(gpu(), cpu, test::random_bf16("a", {512, 4096}), kBF16, DType::kE5M2);
  const Both b(gpu(), cpu, test::random_bf16("b", {256, 4096}), kBF16, DType::kE4M3);
  std::vector<uint8_t> first;
  for (int run = 0; run < 5; ++run) {
    const OnGpu y(gpu(), kF32, {512, 256});
    ops::run(gpu(), ops::Fp8Product{.y_MN = y,
                                    .a_MK = {a.y_gpu, a.inverse_scale_gpu},
                                    .b_NK = {b.y_gpu, b.inverse_scale_gpu},
                                    .fast_accumulation = false});
    if (run == 0) first = y.raw();
    EXPECT_TRUE(y.raw() == first);
  }
}

TEST_F(Fp8, ScalesAndTransposesHaveTheBitsOfTheCpu) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 16}, {8, 80}, {3, 1000}}) {
    Owned x = test::random_normal("x", {rows, cols});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) x.at(r, c) = std::fabs(x.at(r, c));
    }
    for (int64_t r = 0; r < rows; ++r) x.at(r, 0) = 0;
    const Owned amax = test::poisoned({cols}), inverse_scale = test::poisoned({cols, 1});
    const OnGpu x_gpu(gpu(), x, kF32), amax_gpu(gpu(), kF32, {cols});
    const OnGpu inverse_scale_gpu(gpu(), kF32, {cols, 1});
    ops::run(cpu, ops::Fp8Scales{.amax_N = amax, .inverse_scale_N1 = inverse_scale, .x_WN = x});
    ops::run(gpu(), ops::Fp8Scales{
                        .amax_N = amax_gpu, .inverse_scale_N1 = inverse_scale_gpu, .x_WN = x_gpu});
    EXPECT_EQ(amax_gpu.values(), test::to_f64(amax));
    EXPECT_EQ(inverse_scale_gpu.values(), test::to_f64(inverse_scale));
  }
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {16, 48}, {67, 130}, {300, 129}, {1536, 4096}}) {
    const Both both(gpu(), cpu, test::random_bf16("x", {rows, cols}), kBF16, DType::kE4M3);
    const OnGpu y_t(gpu(), DType::kE4M3, {cols, rows});
    ops::run(gpu(), ops::TransposeFp8{.y_CR = y_t, .x_RC = both.y_gpu});
    EXPECT_TRUE(y_t.raw() == bytes(both.y_t)) << rows << " x " << cols;
  }
}

// What kernels find while they write is what a pass over the result finds.
TEST_F(Fp8, KernelsFindTheLargestOfWhatTheyWrite) {
  for (const auto& [tokens, width, gap] : test::kRowCases) {
    const OnGpu x(gpu(), test::random_bf16("x", {tokens, width}), kBF16, gap);
    const OnGpu w(gpu(), test::random_bf16("w", {width}), kBF16);
    const OnGpu wide(gpu(), test::random_bf16("wide", {tokens, 2 * width}), kBF16, gap);
    const OnGpu dwide(gpu(), kBF16, {tokens, 2 * width}), y(gpu(), kBF16, {tokens, width}, gap);
    const OnGpu found(gpu(), kF32, {1}), expected(gpu(), kF32, {1});
    const auto expect_largest_of = [&, tokens = tokens, width = width](const OnGpu& written,
                                                                       const char* op) {
      ops::run(gpu(), ops::Amax{.amax_1 = expected, .x_RC = written});
      EXPECT_EQ(found.values(), expected.values()) << op << " " << tokens << " x " << width;
    };
    ops::run(gpu(), ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = w, .eps = 1e-5f, .amax_1 = found});
    expect_largest_of(y, "rmsnorm");
    // Looking for it changes no bit of the gradient.
    const OnGpu dy(gpu(), test::random_bf16("dy", {tokens, width}), kBF16, gap);
    const OnGpu before(gpu(), test::random_bf16("dx", {tokens, width}, 1, 2), kBF16, gap);
    const OnGpu dw(gpu(), test::constant({width}, 0), kF32);
    ops::RmsNormBackward backward{
        .dx_TD = y, .dw_D = dw, .dy_TD = dy, .x_TD = x, .w_D = w, .eps = 1e-5f};
    ops::run(gpu(), ops::Copy{.y = y, .x = before});
    ops::run(gpu(), backward);
    const auto plain = y.raw();
    backward.amax_1 = found;
    ops::run(gpu(), ops::Copy{.y = y, .x = before});
    ops::run(gpu(), backward);
    EXPECT_TRUE(y.raw() == plain) << tokens << " x " << width;
    expect_largest_of(y, "rmsnorm_backward");
    ops::run(gpu(), ops::Swiglu{.y_TF = y, .gate_up_T2F = wide, .amax_1 = found});
    expect_largest_of(y, "swiglu");
    ops::run(gpu(), ops::SwigluBackward{
                        .dgate_up_T2F = dwide, .dy_TF = x, .gate_up_T2F = wide, .amax_1 = found});
    expect_largest_of(dwide, "swiglu_backward");
  }
}

}  // namespace
}  // namespace sbtrain::fp8_test
