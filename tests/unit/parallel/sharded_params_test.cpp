// The order of calls that a unit of sharded parameters accepts, and the memory that it uses.
#include "parallel/sharded_params.h"

#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain {
namespace {

ParamRegistry two_units() {
  ParamRegistry registry;
  const auto unit = [&](const char* prefix) {
    registry.add_unit(prefix,
                      {{.name = "norm", .shape = {5}, .storage = {}, .init = Init::constant(1)},
                       {.name = "weight",
                        .shape = {7, 5},
                        .storage = {},
                        .init = Init::normal(1),
                        .decay = true}});
  };
  unit("first.");
  unit("second.");
  return registry;
}

class ShardedParamsOrder : public testing::Test {
 protected:
  ShardedParamsOrder() {
    params.initialize(1);
    ops::run(stream, ops::Fill{.x = stats, .value = 0.0f});
  }
  void update() { params.update({.stats = stats}); }
  // The first `calls` calls of a step of a model with one unit.
  void run(int unit, int calls) {
    const std::vector<std::function<void()>> step = {
        [&] { params.gather(unit); },    [&] { params.get(unit); },
        [&] { params.gradients(unit); }, [&] { params.release(unit); },
        [&] { params.reduce(unit); },
    };
    for (int i = 0; i < calls; ++i) step.at(i)();
  }

  ParamRegistry registry = two_units();
  Memory memory{Backend::kCpu};
  Stream stream{memory};
  std::unique_ptr<Communicator> ranks = make_single_process();
  Mesh mesh{*ranks};
  ShardedParams params{registry, stream, mesh, make_optimizer()};
  Buffer stats = memory.allocate(MemoryClass::kOptimizer, "stats", DType::kF64, {ops::kStepStats});
};

TEST_F(ShardedParamsOrder, AStepInOrderRunsAsOftenAsNeeded) {
  for (int step = 0; step < 3; ++step) {
    for (const int unit : {0, 1}) {
      run(unit, 5);
      params.gather(unit);  // without a use, as for attention maps
      params.release(unit);
    }
    params.gather(0);
    params.gather(1);  // the next unit comes while this one is used
    params.get(0);
    params.get(0);
    params.release(0);
    params.release(1);
    params.add_squared_gradient_norm(stats.tensor().row_range(ops::kSquaredNorm, 1));
    update();
  }
}

TEST_F(ShardedParamsOrder, WeightsOutOfOrderThrow) {
  EXPECT_THROW(params.get(0), Error);      // before a gather
  EXPECT_THROW(params.release(0), Error);  // before a gather
  params.gather(0);
  EXPECT_THROW(params.gather(0), Error);  // twice
  EXPECT_THROW(params.get(1), Error);     // another unit
  params.get(0);
  params.release(0);
  EXPECT_THROW(params.get(0), Error);      // after the release
  EXPECT_THROW(params.release(0), Error);  // twice
  params.gather(0);
  params.get(0);
  params.release(0);
}

TEST_F(ShardedParamsOrder, GradientsOutOfOrderThrow) {
  EXPECT_THROW(params.reduce(0), Error);  // before gradients
  params.gradients(0);
  params.gradients(0);
  EXPECT_THROW(params.reduce(1), Error);  // another unit
  params.reduce(0);
  EXPECT_THROW(params.reduce(0), Error);  // twice
  params.gradients(0);                    // of the next micro-batch
  params.reduce(0);
}

TEST_F(ShardedParamsOrder, NothingTouchesAllShardsInTheMiddleOfAUnit) {
  const std::vector<std::function<void()>> whole = {
      [&] { params.initialize(1); },
      [&] { params.refresh(); },
      [&] { params.begin({}); },
      [&] { update(); },
      [&] { params.add_squared_gradient_norm(stats.tensor().row_range(0, 1)); },
  };
  for (const int unit : {0, 1}) {
    for (int calls = 1; calls < 5; ++calls) {
      run(unit, calls);
      for (const auto& call : whole) EXPECT_THROW(call(), Error) << calls;
      if (calls < 4) params.release(unit);
      if (calls < 3) params.gradients(unit);
      params.reduce(unit);
    }
  }
  for (const auto& call : whole) EXPECT_NO_THROW(call());
}

TEST_F(ShardedParamsOrder, ErrorsNameTheUnit) {
  try {
    params.get(1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the unit of 'second.norm' is used without a gather");
  }
  EXPECT_ANY_THROW(params.gather(2));
}

// ---- Memory -------------------------------------------------------------------------------------

double bytes_per_element(Backend target, bool with_training) {
  const ParamRegistry registry = two_units();
  Memory plan = Memory::planning(target);
  Stream stream(plan);
  const std::unique_ptr<Communicator> ranks = make_single_process();
  const Mesh mesh(*ranks);
  const ShardedParams params(registry, stream, mesh, with_training ? make_optimizer() : nullptr);
  return static_cast<double>(plan.report().total_bytes()) / static_cast<double>(registry.storage());
}

TEST(ShardedParamsMemory, InferenceKeepsTheComputeTypeAlone) {
  EXPECT_EQ(bytes_per_element(Backend::kCuda, false), 2);
  EXPECT_EQ(bytes_per_element(Backend::kCpu, false), 4);
  EXPECT_EQ(bytes_per_element(Backend::kCuda, true), 4 + 2 + 4 + 8);
  EXPECT_EQ(bytes_per_element(Backend::kCpu, true), 4 + 4 + 8);
}

}  // namespace
}  // namespace sbtrain
