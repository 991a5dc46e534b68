// Linear layers in fp8 on the GPU, against the emulation of the same roundings.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/op_test.h"
#include "layers/linear.h"

namespace sbtrain {
namespace {

using test::OnGpu;
using test::Owned;

// The bound of the tensor cores' accumulator over K terms, which tests/gpu/ops_fp8_test.cpp
// explains: the inputs are the same bits on both backends, and so are their roundings to fp8.
double linear_accumulator_error(int64_t K, bool fast) {
  const int64_t additions = (fast ? K : std::min<int64_t>(K, 128)) / 32 + 1;
  return static_cast<double>(additions) * 0x1p-13;
}

constexpr int64_t kRowsOfFirst = 48, kRowsOfSecond = 80;

LinearSpec fp8_linear(bool bias) {
  return {.parts = {{.weight = "first", .rows = kRowsOfFirst, .bias = bias ? "first.bias" : ""},
                    {.weight = "second", .rows = kRowsOfSecond, .bias = bias ? "second.bias" : ""}},
          .cols = 192,
          .init = Init::normal(0.1),
          .alpha = 0.5f};
}

// One pass of a layer through a backend. `Held` is a tensor there.
struct Fp8Pass {
  Tensor y, scaled, dx, dw, db;
  Tensor x, w, b, residual, dy;
};

struct Fp8Options {
  bool bias = false, residual = false;
  bool accumulate_dx = false, fresh_dw = false, no_dx = false;
};

Weights parts_of(const Tensor& matrix, const Tensor& bias, bool fresh) {
  Weights w;
  w.add("first", matrix.row_range(0, kRowsOfFirst), fresh);
  w.add("second", matrix.row_range(kRowsOfFirst, kRowsOfSecond), fresh);
  w.add("first.bias", bias.row_range(0, kRowsOfFirst));
  w.add("second.bias", bias.row_range(kRowsOfFirst, kRowsOfSecond));
  return w;
}

void run_layer(Stream& s, const Fp8Options& o, const Fp8Pass& p) {
  s.set_precision(Precision::kFp8);
  const Linear layer(fp8_linear(o.bias));
  const Weights w = parts_of(p.w, p.b, false), dw = parts_of(p.dw, p.db, o.fresh_dw);
  layer.forward(s, p.y, p.x, w, o.residual ? p.residual : Tensor());
  layer.forward_scaled(s, p.scaled, p.x, w, kRowsOfFirst, 0.125f);
  layer.backward(s, o.no_dx ? Tensor() : p.dx, dw, p.dy, p.x, w, o.accumulate_dx);
}

class Fp8Linear : public test::GpuOpTest {
 protected:
  void SetUp() override {
    test::GpuOpTest::SetUp();
    if (IsSkipped()) return;
    const int sm = present_target(Backend::kCuda).sm;
    if (sm < 89) GTEST_SKIP() << "fp8 products need compute capability 8.9; this GPU has " << sm;
  }
  void expect_emulated(int64_t T, const Fp8Options& o);
};

void Fp8Linear::expect_emulated(int64_t T, const Fp8Options& o) {
  constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;
  const int64_t N = kRowsOfFirst + kRowsOfSecond, K = fp8_linear(false).cols;
  const Owned x = test::random_bf16("x", {T, K}), w = test::random_bf16("w", {N, K}, 0.1);
  const Owned b = test::random_bf16("b", {N}), residual = test::random_bf16("residual", {T, N});
  const Owned dy = test::random_bf16("dy", {T, N}, 1e-3);
  const Owned y = test::poisoned({T, N}), scaled = test::poisoned({T, N});
  const Owned dx = test::random_bf16("dx", {T, K}, 1e-3), dw = test::random_bf16("dw", {N, K}, 0.1);
  const Owned db = test::random_bf16("db", {N}, 0.1);
  const OnGpu x_gpu(gpu(), x, kBF16), w_gpu(gpu(), w, kBF16), b_gpu(gpu(), b, kBF16);
  const OnGpu residual_gpu(gpu(), residual, kBF16), dy_gpu(gpu(), dy, kBF16);
  const OnGpu y_gpu(gpu(), kBF16, {T, N}), scaled_gpu(gpu(), kBF16, {T, N});
  const OnGpu dx_gpu(gpu(), dx, kBF16), dw_gpu(gpu(), dw, kF32), db_gpu(gpu(), db, kF32);
  run_layer(cpu, o, {y, scaled, dx, dw, db, x, w, b, residual, dy});
  run_layer(gpu(), o,
            {y_gpu, scaled_gpu, dx_gpu, dw_gpu, db_gpu, x_gpu, w_gpu, b_gpu, residual_gpu, dy_gpu});
  const auto bound = [](double rounding, int64_t terms, bool fast) {
    return rounding + linear_accumulator_error(terms, fast);
  };
  // A bias is added to what has been rounded to bf16 already.
  const double roundings = o.bias ? 2 * test::kBf16Error : test::kBf16Error;
  EXPECT_LE(test::relative_error(y_gpu, y), bound(roundings, K, true));
  EXPECT_LE(test::relative_error(scaled_gpu, scaled), bound(test::kBf16Error, K, true));
  EXPECT_LE(test::relative_error(dw_gpu, dw), bound(test::kF32Error, T, false));
  EXPECT_LE(test::relative_error(dx_gpu, dx), bound(test::kBf16Error, N, true));
}

TEST_F(Fp8Linear, IsNearTheEmulationWithEveryOption) {
  for (const int64_t T : {16, 272, 2048}) {
    for (const Fp8Options& o :
         {Fp8Options{}, Fp8Options{.bias = true}, Fp8Options{.residual = true},
          Fp8Options{.accumulate_dx = true}, Fp8Options{.fresh_dw = true},
          Fp8Options{.fresh_dw = true, .no_dx = true}}) {
      SCOPED_TRACE(std::to_string(T));
      expect_emulated(T, o);
    }
  }
}

}  // namespace
}  // namespace sbtrain
