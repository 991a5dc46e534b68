// Parameters on the GPU: inference loads the same values as the compute copies of training hold.
#include "parallel/sharded_params.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/gpu.h"

namespace sbtrain::test {
namespace {

using GpuShardedParams = GpuTest;

TEST_F(GpuShardedParams, InferenceHasTheBitsOfTheComputeCopies) {
  ParamRegistry registry;
  registry.add_unit(
      "",
      {{.name = "w", .shape = {1000, 300}, .storage = {}, .init = Init::normal(1), .decay = true}});
  GpuStream gpu;
  const std::unique_ptr<Communicator> ranks = make_single_process();
  const Mesh mesh(*ranks);
  const auto bits = [&](bool with_training) {
    ShardedParams params(registry, gpu, mesh, with_training ? make_optimizer() : nullptr);
    params.initialize(5);
    params.gather(0);
    const Tensor& w = params.get(0).at("w");
    EXPECT_EQ(w.dtype, DType::kBF16);
    std::vector<uint16_t> values(static_cast<size_t>(w.numel()));
    ops::run(gpu, ops::CopyToHost{.host = values.data(), .x = w});
    params.release(0);
    return values;
  };
  EXPECT_EQ(bits(false), bits(true));
}

}  // namespace
}  // namespace sbtrain::test
