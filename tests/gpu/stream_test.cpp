// Streams of the GPU and the events between them.
#include <gtest/gtest.h>

#include <stdexcept>

#include "core/graph.h"
#include "ops/linear.h"
#include "ops/memory.h"
#include "ops/optimizer.h"
#include "ops/stream_control.h"
#include "support/gpu.h"

namespace sbtrain::test {
namespace {

using GpuStreams = GpuTest;

// The work is so long that without the events the other stream would overtake it.
TEST_F(GpuStreams, AStreamWaitsForTheWorkOfAnother) {
  constexpr int64_t kElements = int64_t{1} << 26;
  constexpr int kFills = 50;
  Memory memory(Backend::kCuda);
  Stream compute(memory);
  Stream communication(memory, "communication", StreamPriority::kHigh);
  const Buffer x = compute.allocate(MemoryClass::kInputs, "x", DType::kF32, {kElements});
  Event there, filled;
  for (int round = 1; round <= 3; ++round) {
    compute.record(there);
    communication.wait(there);
    communication.use(x);
    for (int i = kFills; i > 0; --i)
      ops::run(communication, ops::Fill{.x = x, .value = static_cast<float>(i * round)});
    communication.record(filled);
    compute.wait(filled);
    EXPECT_EQ(ops::sum(compute, x), static_cast<double>(kElements * round));
    filled.synchronize();
    EXPECT_TRUE(filled.done());
  }
}

TEST_F(GpuStreams, ReleasedMemoryIsReusedOnAnotherStreamAfterAnEvent) {
  Memory memory(Backend::kCuda);
  Stream compute(memory);
  Stream communication(memory, "communication");
  Buffer buffer = compute.allocate(MemoryClass::kInputs, "x", DType::kF32, {1000});
  const void* released = buffer.tensor().data;
  buffer.release();
  const Buffer other = communication.allocate(MemoryClass::kInputs, "y", DType::kF32, {1000});
  EXPECT_NE(other.tensor().data, released);
  Event event;
  compute.record(event);
  communication.wait(event);
  const Buffer third = communication.allocate(MemoryClass::kInputs, "z", DType::kF32, {1000});
  EXPECT_EQ(third.tensor().data, released);
}

TEST_F(GpuStreams, BytesAreCopiedInOrder) {
  GpuStream gpu;
  const Buffer from = gpu.memory.allocate(MemoryClass::kInputs, "from", DType::kF32, {100});
  const Buffer to = gpu.memory.allocate(MemoryClass::kInputs, "to", DType::kF32, {100});
  ops::run(gpu, ops::Fill{.x = from, .value = 2.0f});
  gpu.stream.copy_bytes(to.tensor().data, from.tensor().data, from.tensor().bytes());
  ops::run(gpu, ops::Fill{.x = from, .value = 3.0f});
  EXPECT_EQ(ops::sum(gpu, to), 200.0);
}

// The second stream waits for the first, so its op begins after the other has ended.
TEST_F(GpuStreams, ATraceHasOneClockForAllStreams) {
  Memory memory(Backend::kCuda);
  Stream compute(memory);
  Stream communication(memory, "communication", StreamPriority::kHigh);
  OpProfile profiles[2];
  compute.set_profile(&profiles[0]);
  communication.set_profile(&profiles[1]);
  const Buffer x = compute.allocate(MemoryClass::kInputs, "x", DType::kF32, {int64_t{1} << 26});
  std::vector<ops::TracedOp> first, second;
  ops::run(compute, ops::Fill{.x = x, .value = 0.0f});  // not traced
  ops::run(compute, ops::Synchronize{});
  ops::control(compute).trace({{&compute, &first}, {&communication, &second}});
  Event filled;
  ops::run(compute, ops::Fill{.x = x, .value = 1.0f});
  compute.record(filled);
  communication.wait(filled);
  communication.use(x);
  ops::run(communication, ops::Fill{.x = x, .value = 2.0f});
  for (Stream* s : {&compute, &communication}) ops::run(*s, ops::Synchronize{});
  ASSERT_EQ(first.size(), 1u);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(first[0].name, "fill");
  EXPECT_GE(first[0].begin, 0.0);
  EXPECT_GT(first[0].seconds, 0.0);
  // Events are half a microsecond apart at best.
  EXPECT_GE(second[0].begin, first[0].begin + first[0].seconds - 1e-6);
  ops::run(compute, ops::Fill{.x = x, .value = 3.0f});
  ops::run(compute, ops::Synchronize{});
  EXPECT_EQ(first.size(), 1u);  // the trace has ended
}

// Work with a name and variant is called twice: plainly, then to record it. Records see what memory
// holds when they run.
TEST_F(GpuStreams, RecordedWorkRunsWithoutBeingCalled) {
  GpuStream gpu;
  const Buffer x = gpu.memory.allocate(MemoryClass::kInputs, "x", DType::kF32, {100});
  const Buffer y = gpu.memory.allocate(MemoryClass::kInputs, "y", DType::kF32, {100});
  CapturedGraph graph(gpu);
  int calls = 0;
  const auto add = [&] {
    ++calls;
    ops::run(gpu, ops::Add{.y = y, .x = x});
  };
  ops::run(gpu, ops::Fill{.x = y, .value = 0.0f});
  double expected = 0;
  for (int n = 1; n <= 5; ++n) {
    ops::run(gpu, ops::Fill{.x = x, .value = static_cast<float>(n)});
    graph.run("add", 0, add);
    expected += 100 * n;
    EXPECT_EQ(ops::sum(gpu, y), expected) << n;
    EXPECT_EQ(calls, std::min(n, 2));
  }
  graph.run("add", 1, add);
  EXPECT_EQ(calls, 3);
  OpProfile profile;
  gpu.stream.set_profile(&profile);
  graph.run("add", 0, add);
  gpu.stream.set_profile(nullptr);
  EXPECT_EQ(calls, 4);
}

// Both products of a backward pass run at the same time there, and what follows waits for both.
TEST_F(GpuStreams, RecordedBackwardPassesHaveTheBitsOfPlainOnes) {
  GpuStream gpu;
  const int64_t T = 1024, N = 688, K = 128;
  const OnGpu w(gpu, random_normal("w", {N, K}), DType::kBF16);
  const OnGpu x(gpu, random_normal("x", {T, K}), DType::kBF16);
  const OnGpu dy(gpu, random_normal("dy", {T, N}), DType::kBF16);
  struct Gradients {
    OnGpu dx, dw, sum;
  };
  const auto make = [&] {
    return Gradients{OnGpu(gpu, DType::kBF16, {T, K}), OnGpu(gpu, DType::kF32, {N, K}),
                     OnGpu(gpu, DType::kF64, {1})};
  };
  const Gradients plain = make(), recorded = make();
  const auto work = [&](const Gradients& to) {
    for (int layer = 0; layer < 8; ++layer) {
      ops::run(gpu, ops::LinearBackward{.dx_TK = to.dx,
                                        .dw_NK = to.dw,
                                        .dy_TN = dy,
                                        .x_TK = x,
                                        .w_NK = w,
                                        .accumulate_dx = layer > 0 && layer % 2 == 0,
                                        .accumulate_dw = layer > 0});
    }
    ops::run(gpu, ops::Fill{.x = to.sum, .value = 0.0f});
    ops::run(gpu, ops::AddSum{.y_1 = to.sum, .x = to.dw});
  };
  work(plain);
  CapturedGraph graph(gpu);
  for (int n = 0; n < 5; ++n) {
    ops::run(gpu, ops::Fill{.x = recorded.dw, .value = 1e30f});
    graph.run("backward", 0, [&] { work(recorded); });
    EXPECT_EQ(recorded.dx.raw(), plain.dx.raw()) << n;
    EXPECT_EQ(recorded.dw.raw(), plain.dw.raw()) << n;
    EXPECT_EQ(recorded.sum.raw(), plain.sum.raw()) << n;
  }
}

TEST_F(GpuStreams, WorkThatFailsWhileItIsRecordedLeavesTheStreamUsable) {
  GpuStream gpu;
  const Buffer x = gpu.memory.allocate(MemoryClass::kInputs, "x", DType::kF32, {100});
  CapturedGraph graph(gpu);
  const auto fill = [&](bool fails) {
    ops::run(gpu, ops::Fill{.x = x, .value = 2.0f});
    if (fails) throw std::runtime_error("no");
  };
  graph.run("fill", 0, [&] { fill(false); });
  EXPECT_THROW(graph.run("fill", 0, [&] { fill(true); }), std::runtime_error);
  ops::run(gpu, ops::Fill{.x = x, .value = 1.0f});
  EXPECT_EQ(ops::sum(gpu, x), 100.0);
  graph.run("fill", 0, [&] { fill(false); });
  EXPECT_EQ(ops::sum(gpu, x), 200.0);
}

}  // namespace
}  // namespace sbtrain::test
