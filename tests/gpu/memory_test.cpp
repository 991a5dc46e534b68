// A step takes as much memory from the device as its plan says. No other program may use the device
// during this test.
#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include "core/device.h"
#include "support/gpu.h"
#include "support/step_run.h"

namespace sbtrain::test {
namespace {

using GpuMemory = GpuTest;

TEST_F(GpuMemory, ThePlanIsWhatTheStepTakes) {
  struct Case {
    const char* type;
    Offload offload = Offload::kNone;
    Recompute recompute = Recompute::kNone;
    Precision precision = Precision::kBf16;
  };
  for (const auto& [type, offload, recompute, precision] :
       {Case{"stickbreaking"}, Case{"softmax"},
        Case{"stickbreaking", Offload::kActivations, Recompute::kFull},
        Case{"stickbreaking", Offload::kNone, Recompute::kSelective},
        Case{"stickbreaking", Offload::kNone, Recompute::kSelective, Precision::kFp8}}) {
    if (precision == Precision::kFp8 && present_target(Backend::kCuda).sm < 89) continue;
    Config config;
    config.model.layers = 4;
    config.model.width = 1024;
    config.model.inner = 2730;
    config.model.heads = 16;
    config.model.vocab = 32000;
    config.model.tied = false;
    config.model.attention[0].type = type;
    config.train.sequence_length = 1024;
    config.train.micro_batch = 4;
    config.train.batch = 4;
    config.train.offload = offload;
    config.train.recompute = recompute;
    config.train.precision = precision;
    Config tiny = config;  // loads kernels and libraries
    tiny.model.layers = 1;
    tiny.model.vocab = 512;
    const std::vector<int32_t> documents = {1024, 1024, 1000, 24, 1024};
    StepRun(tiny, true).step({packed_batch(documents, tiny.model.vocab)});
    const size_t before = device_memory(Backend::kCuda).free;
    StepRun run(config, true);
    run.step({packed_batch(documents, config.model.vocab)});
    const size_t after = device_memory(Backend::kCuda).free;
    const size_t planned = run.report().total_bytes();
    const auto taken = static_cast<double>(before) - static_cast<double>(after);
    EXPECT_GT(planned, size_t{2} << 30);
    EXPECT_NEAR(taken, static_cast<double>(planned),
                0.02 * static_cast<double>(planned) + (64 << 20));
    std::printf("%s, offload %s, recompute %s, %s: planned %.1f MiB, taken %.1f MiB\n", type,
                std::string(name_of(offload)).c_str(), std::string(name_of(recompute)).c_str(),
                std::string(name_of(precision)).c_str(), static_cast<double>(planned) / (1 << 20),
                taken / (1 << 20));
  }
}

}  // namespace
}  // namespace sbtrain::test
