#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "gpu/op_test.h"
#include "kernels/cross_entropy.h"
#include "ops/cuda/context.h"
#include "ops/loss.h"

namespace sbtrain::loss_test {
namespace {

using test::OnGpu;
using test::Owned;
using Loss = test::GpuOpTest;
using Values = std::vector<double>;

// Every fifth target is ignored.
Owned targets(int64_t rows, int32_t vocab) {
  Owned ids = test::random_integers("targets", rows, vocab);
  for (int64_t i = 2; i < rows; i += 5) ids.i32()[i] = -1;
  return ids;
}

struct Reference {
  Values loss, dlogits;
};
Reference cross_entropy(const Values& logits, const Owned& targets, int64_t vocab, double weight,
                        double z_loss) {
  Reference out;
  for (int64_t row = 0; row < targets.tensor().numel(); ++row) {
    const double* z = logits.data() + row * vocab;
    const int32_t target = targets.i32()[row];
    const double max = *std::max_element(z, z + vocab);
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(z[i] - max);
    const double lse = max + std::log(sum);
    out.loss.push_back(target < 0 ? 0 : lse - z[target]);
    for (int64_t i = 0; i < vocab; ++i) {
      const double p = std::exp(z[i] - lse);
      const double gradient = weight * ((1 + 2 * z_loss * lse) * p - (i == target ? 1 : 0));
      out.dlogits.push_back(target < 0 ? 0 : gradient);
    }
  }
  return out;
}

TEST_F(Loss, CrossEntropyMatchesFp64AndRepeats) {
  struct Case {
    int64_t rows, vocab, gap;
    double mean;
  };
  for (const Case& c : {Case{1, 1, 0, 0},
                        {7, 3, 1, 0},
                        {33, 1000, 0, 50},
                        {12, 1001, 3, -90},
                        {20, 50257, 0, 0},
                        {20, 49152, 8, 5}}) {
    const Owned logits = test::random_normal("logits", {c.rows, c.vocab}, 3, c.mean);
    const Owned ids = targets(c.rows, static_cast<int32_t>(c.vocab));
    const Reference expected = cross_entropy(test::to_f64(logits), ids, c.vocab, 0.5, 1e-3);
    const OnGpu logits_gpu(gpu(), logits, DType::kF32, c.gap);
    const OnGpu ids_gpu(gpu(), ids, DType::kI32);
    const auto run = [&](const OnGpu& loss, const Tensor& dlogits) {
      kernels::launch(ops::cuda::cuda_stream(gpu()),
                      {.loss = loss.tensor().f32(),
                       .dlogits = {static_cast<__nv_bfloat16*>(dlogits.data), dlogits.row_stride},
                       .logits = {logits_gpu.tensor().f32(), logits_gpu.tensor().row_stride},
                       .targets = ids_gpu.tensor().i32(),
                       .rows = c.rows,
                       .vocab = c.vocab,
                       .loss_weight = 0.5f,
                       .z_loss = 1e-3f});
    };
    const OnGpu loss1(gpu(), DType::kF32, {c.rows});
    const OnGpu loss2(gpu(), DType::kF32, {c.rows});
    const OnGpu loss_alone(gpu(), DType::kF32, {c.rows});
    const OnGpu dlogits1(gpu(), DType::kBF16, {c.rows, c.vocab}, c.gap);
    const OnGpu dlogits2(gpu(), DType::kBF16, {c.rows, c.vocab}, c.gap);
    run(loss1, dlogits1);
    run(loss2, dlogits2);
    run(loss_alone, {});
    EXPECT_LE(test::relative_error(loss1, expected.loss), test::kF32Error) << c.vocab;
    EXPECT_LE(test::relative_error(dlogits1, expected.dlogits), test::kBf16Error) << c.vocab;
    EXPECT_TRUE(dlogits1.gaps_intact());
    EXPECT_EQ(loss1.raw(), loss2.raw());
    EXPECT_EQ(loss1.raw(), loss_alone.raw());
    EXPECT_EQ(dlogits1.raw(), dlogits2.raw());
  }
}

// A target is a hit if its logit is larger than all others; if two are equal there is no hit.
TEST_F(Loss, HitsAreTargetsLargerThanAllOthers) {
  for (const int64_t vocab : {int64_t{5}, int64_t{1000}, int64_t{8192}, int64_t{50257}}) {
    constexpr int64_t kRows = 40;
    Owned logits = test::random_normal("logits", {kRows, vocab});
    const Owned ids = targets(kRows, static_cast<int32_t>(vocab));
    Values expected;
    for (int64_t row = 0; row < kRows; ++row) {
      float* z = logits.f32() + row * vocab;
      float* largest = std::max_element(z, z + vocab);
      int32_t& target = ids.i32()[row];
      if (row % 3 != 0 && target >= 0) target = static_cast<int32_t>(largest - z);
      const bool tied = row % 3 == 2;
      if (tied) z[(largest - z + vocab / 2) % vocab] = *largest;
      expected.push_back(target == largest - z && !tied ? 1 : 0);
    }
    ASSERT_GT(std::count(expected.begin(), expected.end(), 1.0), 5);
    const OnGpu logits_gpu(gpu(), logits, DType::kF32);
    const OnGpu ids_gpu(gpu(), ids, DType::kI32);
    const OnGpu loss(gpu(), DType::kF32, {kRows});
    const OnGpu hits(gpu(), DType::kF32, {kRows});
    const OnGpu dlogits(gpu(), DType::kBF16, {kRows, vocab});
    for (__nv_bfloat16* gradient : {static_cast<__nv_bfloat16*>(nullptr),
                                    static_cast<__nv_bfloat16*>(dlogits.tensor().data)}) {
      kernels::launch(ops::cuda::cuda_stream(gpu()), {.loss = loss.tensor().f32(),
                                                      .hits = hits.tensor().f32(),
                                                      .dlogits = {gradient, vocab},
                                                      .logits = {logits_gpu.tensor().f32(), vocab},
                                                      .targets = ids_gpu.tensor().i32(),
                                                      .rows = kRows,
                                                      .vocab = vocab,
                                                      .loss_weight = 1,
                                                      .z_loss = 0});
      EXPECT_EQ(hits.values(), expected) << vocab;
    }
  }
}

TEST_F(Loss, NonFiniteLogitsShow) {
  Owned logits = test::random_normal("logits", {2, 64});
  logits.at(0, 3) = std::nanf("");
  logits.at(1, 5) = INFINITY;
  const OnGpu logits_gpu(gpu(), logits, DType::kF32);
  const OnGpu ids(gpu(), test::integers({1, 1}), DType::kI32);
  const OnGpu loss(gpu(), DType::kF32, {2});
  kernels::launch(ops::cuda::cuda_stream(gpu()), {.loss = loss.tensor().f32(),
                                                  .dlogits = {nullptr, 0},
                                                  .logits = {logits_gpu.tensor().f32(), 64},
                                                  .targets = ids.tensor().i32(),
                                                  .rows = 2,
                                                  .vocab = 64,
                                                  .loss_weight = 1,
                                                  .z_loss = 0});
  for (const double v : loss.values()) EXPECT_FALSE(std::isfinite(v));
}

TEST_F(Loss, LinearCrossEntropyMatchesTheCpu) {
  constexpr int64_t kTokens = 300;
  constexpr int64_t kWidth = 64;
  constexpr int32_t kVocab = 1000;
  const Owned x = test::random_bf16("x", {kTokens, kWidth});
  const Owned w = test::random_bf16("w", {kVocab, kWidth}, 0.3);
  const Owned ids = targets(kTokens, kVocab);
  const Owned loss = test::poisoned({kTokens});
  const Owned dx = test::poisoned({kTokens, kWidth});
  const Owned dw = test::constant({kVocab, kWidth}, 0);
  const OnGpu loss_gpu(gpu(), DType::kF32, {kTokens});
  const OnGpu dx_gpu(gpu(), DType::kBF16, {kTokens, kWidth});
  const OnGpu dw_gpu(gpu(), dw, DType::kF32);
  const OnGpu x_gpu(gpu(), x, DType::kBF16);
  const OnGpu w_gpu(gpu(), w, DType::kBF16);
  const OnGpu ids_gpu(gpu(), ids, DType::kI32);
  const Owned hits = test::poisoned({kTokens});
  const OnGpu hits_gpu(gpu(), DType::kF32, {kTokens});
  ops::CrossEntropy t{
      .loss_T = loss, .dx_TD = dx, .dw_VD = dw, .x_TD = x, .w_VD = w, .targets_T = ids};
  t.hits_T = hits;
  t.loss_weight = 0.01f;
  t.logit_scale = 0.7f;
  t.z_loss = 1e-4f;
  ops::run(cpu, t);
  t.loss_T = loss_gpu;
  t.hits_T = hits_gpu;
  t.dx_TD = dx_gpu;
  t.dw_VD = dw_gpu;
  t.x_TD = x_gpu;
  t.w_VD = w_gpu;
  t.targets_T = ids_gpu;
  ops::run(gpu(), t);
  EXPECT_LE(test::relative_error(loss_gpu, loss), test::kF32Error);
  EXPECT_EQ(hits_gpu.values(), test::to_f64(hits));
  // Both depend on the gradient of the logits, which is stored in bf16.
  EXPECT_LE(test::relative_error(dx_gpu, dx), test::kBf16Error);
  EXPECT_LE(test::relative_error(dw_gpu, dw), test::kBf16Error);
}

}  // namespace
}  // namespace sbtrain::loss_test
