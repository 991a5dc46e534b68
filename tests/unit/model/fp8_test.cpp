// Models whose products are in emulated fp8.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "config/schema.h"
#include "model/block.h"
#include "support/fp8_gradients.h"
#include "support/model.h"
#include "support/tensors.h"

namespace sbtrain::test {
namespace {

ModelConfig fp8_model() {
  ModelConfig config;
  config.layers = 3;
  config.width = 64;
  config.inner = 176;
  config.heads = 2;
  config.vocab = 253;
  config.tied = true;
  config.init_std = 0.1;
  config.attention = {parse_attention("{}")};
  return config;
}

struct Fp8Pass {
  double loss;
  Gradients gradients;
};

Fp8Pass pass(Precision precision, bool rounded_weights) {
  ModelRun run(Backend::kCpu, fp8_model(), packed_batch({97, 62, 33}, fp8_model().vocab));
  if (rounded_weights) run.round_to_bf16("");
  run.stream().set_precision(precision);
  Fp8Pass result{.loss = run.backward(), .gradients = {}};
  for (const auto& [name, values] : run.gradients()) result.gradients[name] = widened(values);
  return result;
}

// What a GPU's gradients are compared by holds of two emulations that differ as a GPU differs from
// the emulation: by roundings to bf16.
TEST(Fp8Emulation, GradientsOfRoundedWeightsDifferByIndependentErrors) {
  const Fp8Pass exact = pass(Precision::kBf16, false);
  const Fp8Pass fp8 = pass(Precision::kFp8, false), rounded = pass(Precision::kFp8, true);
  EXPECT_NEAR(rounded.loss, fp8.loss, 5e-3 * fp8.loss);
  expect_errors_of_fp8(rounded.gradients, fp8.gradients, exact.gradients);
}

// Weights that are held in fp8 are what a layer would make of them at each use, and whether what
// the backward pass needs is kept or computed again changes nothing.
TEST(Fp8Emulation, HeldWeightsAndRecomputationGiveTheSameBits) {
  const auto run = [&](Precision held, Recompute recompute) {
    ModelRun run(Backend::kCpu, fp8_model(), packed_batch({33, 31}, fp8_model().vocab), recompute,
                 held);
    run.disturb_constants();
    run.stream().set_precision(Precision::kFp8);
    run.backward();
    return run.gradients();
  };
  const auto expected = run(Precision::kBf16, Recompute::kNone);
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    EXPECT_EQ(run(Precision::kFp8, recompute), expected) << name_of(recompute);
  }
}

// The gradients of a block by itself, with random weights, from that of its output.
class BlockGradients {
 public:
  BlockGradients(const ModelConfig& config, bool with_amax)
      : block_(config, config.attention.front(), Recompute::kNone),
        weights_(random_normal("weights", {elements()}, 0.1)),
        gradients_(constant({elements()}, 0)) {
    stream_.stream.set_precision(Precision::kFp8);
    int64_t begin = 0;
    for (const TensorSpec& spec : block_.parameters()) {
      const auto place = [&](const Owned& all) {
        return Tensor(all.f32() + begin, DType::kF32, spec.stored());
      };
      w_.add(spec.name, place(weights_));
      dw_.add(spec.name, place(gradients_));
      begin += size(spec);
    }
    const std::vector<int32_t> bounds = {0, kTokens};
    std::copy(bounds.begin(), bounds.end(), bounds_.i32());
    std::iota(positions_.i32(), positions_.i32() + kTokens, 0);
    run(with_amax);
  }
  const Owned& dx() const { return dx_; }
  const Owned& dw() const { return gradients_; }
  float amax() const { return *amax_.f32(); }
  static float largest(const Owned& x) {
    float largest = 0;
    for (const double value : to_f64(x)) {
      largest = std::max(largest, static_cast<float>(std::fabs(value)));
    }
    return largest;
  }
  bool takes_amax() const { return block_.takes_amax(stream_.stream, kTokens); }

 private:
  static constexpr int32_t kTokens = 64;
  static int64_t size(const TensorSpec& spec) {
    int64_t n = 1;
    for (const int64_t extent : spec.stored()) n *= extent;
    return n;
  }
  int64_t elements() const {
    int64_t n = 0;
    for (const TensorSpec& spec : block_.parameters()) n += size(spec);
    return n;
  }
  void run(bool with_amax) {
    const int64_t D = dx_.tensor().cols();
    const Owned x = random_normal("x", {kTokens, D}), y = poisoned({kTokens, D});
    const Sequences sequences{
        .cu_seqlens = bounds_, .positions_T = positions_, .count = 1, .max_seqlen = kTokens};
    BlockSaved saved;
    block_.forward(stream_, y, x, w_, saved, sequences);
    *amax_.f32() = largest(dx_);
    block_.backward(stream_, {.x_TD = dx_, .amax_1 = with_amax ? Tensor(amax_) : Tensor()}, x, w_,
                    dw_, saved, sequences);
  }

  CpuStream stream_;
  Block block_;
  Owned weights_, gradients_;
  Weights w_, dw_;
  Owned bounds_{DType::kI32, {2}}, positions_{DType::kI32, {kTokens}};
  Owned dx_ = random_normal("dy", {kTokens, 64}, 1e-3), amax_ = poisoned({1});
};

// The largest |dx| that goes along with a gradient is the one that a cast would look for.
TEST(Fp8Emulation, AmaxesThatComeWithGradientsChangeNothing) {
  for (const bool parallel : {false, true}) {
    for (const NormKind norm : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      ModelConfig config = fp8_model();
      config.parallel_residual = parallel;
      config.norm = norm;
      const BlockGradients given(config, true), looked_for(config, false);
      EXPECT_TRUE(given.takes_amax());
      EXPECT_TRUE(bitwise_equal(given.dx(), looked_for.dx())) << parallel;
      EXPECT_TRUE(bitwise_equal(given.dw(), looked_for.dw())) << parallel;
      EXPECT_EQ(given.amax(), BlockGradients::largest(given.dx())) << parallel;
    }
  }
  ModelConfig config = fp8_model();
  config.norm_position = NormPosition::kOutput;
  EXPECT_FALSE(BlockGradients(config, false).takes_amax());
}

}  // namespace
}  // namespace sbtrain::test
