// What train.precision: auto times on a GPU.
#include "train/precision_choice.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "config/schema.h"
#include "support/gpu.h"

namespace sbtrain {
namespace {

class GpuPrecisionChoice : public test::GpuTest {};

// A model of width 32 has products of microseconds, in front of which casts take as long.
TEST_F(GpuPrecisionChoice, KeepsBf16ForASmallModel) {
  const Config config = parse_config(
      "model: {layers: 3, width: 32, inner: 48, heads: 2, vocab: 23}\n"
      "train: {sequence_length: 64, micro_batch: 2, batch: 8, precision: auto}\n"
      "data: {task: {type: mqar, pairs: 2}}\n"
      "stages: [{name: train, length: 10 steps}]\n",
      "test");
  const auto alone = make_single_process();
  const PrecisionChoice choice = choose_precision(config, Backend::kCuda, *alone);
  std::printf("%s: %s\n", name_of(choice.precision).data(), choice.reason.c_str());
  EXPECT_EQ(choice.precision, Precision::kBf16);
  EXPECT_NE(choice.reason.find(present_target(Backend::kCuda).sm < 89 ? "compute" : "in fp8"),
            std::string::npos);
}

}  // namespace
}  // namespace sbtrain
