// Models whose products are in emulated fp8.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "config/schema.h"
#include "support/fp8_gradients.h"
#include "support/model.h"

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

}  // namespace
}  // namespace sbtrain::test
