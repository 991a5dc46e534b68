// Ops on Backend::kPlan: nothing is read or written, and the same scratch is taken as by the
// real ops, or the replay below would throw.
#include <gtest/gtest.h>

#include "core/device.h"
#include "core/error.h"
#include "ops/ops.h"

namespace sbtrain {
namespace {

constexpr int64_t kTokens = 48;
constexpr int64_t kWidth = 16;
constexpr int64_t kVocab = 64;

Buffer allocate(Memory& memory, DType dtype, std::initializer_list<int64_t> shape) {
  return memory.allocate(MemoryClass::kActivations, "t", dtype, shape);
}

// Every op, on tensors of one program.
void run_every_op(Memory& memory) {
  Stream s(memory);
  const ProgramScope program(memory, "ops");
  const Buffer x = allocate(memory, DType::kF32, {kTokens, kWidth});
  const Buffer y = allocate(memory, DType::kF32, {kTokens, kWidth});
  const Buffer wide = allocate(memory, DType::kF32, {kTokens, 2 * kWidth});
  const Buffer dwide = allocate(memory, DType::kF32, {kTokens, 2 * kWidth});
  const Buffer square = allocate(memory, DType::kF32, {kWidth, kWidth});
  const Buffer row = allocate(memory, DType::kF32, {kWidth});
  const Buffer drow = allocate(memory, DType::kF32, {kWidth});
  const Buffer table = allocate(memory, DType::kF32, {kVocab, kWidth});
  const Buffer dtable = allocate(memory, DType::kF32, {kVocab, kWidth});
  const Buffer losses = allocate(memory, DType::kF32, {kTokens});
  const Buffer ids = allocate(memory, DType::kI32, {kTokens});
  for (const Buffer* b : {&x, &wide, &square, &row, &drow, &table, &dtable}) ops::fill(s, *b, 0.5f);
  ops::fill(s, ids, 1);

  ops::embedding(s, x, ids, table, 1.0f);
  ops::rmsnorm(s, y, x, row, 1e-5f);
  ops::rmsnorm_backward(s, x, drow, y, x, row, 1e-5f);
  ops::head_norm(s, y, x, row, drow, 2, 1e-5f);
  ops::head_norm_backward(s, y, drow, row, x, x, row, 2, 1e-5f);
  ops::linear(s, y, x, square, {.residual = x});
  ops::linear_backward_input(s, y, x, square);
  ops::linear_backward_weight(s, square, y, x);
  ops::bias_backward(s, drow, y);
  ops::swiglu(s, y, wide);
  ops::swiglu_backward(s, dwide, y, wide);
  ops::bias_sigmoid(s, y, x, row);
  ops::sigmoid_backward(s, x, y, y);
  ops::rope(s, x, ids, {.heads = 2});
  ops::linear_cross_entropy(
      s,
      {.loss_T = losses, .dx_TD = y, .dw_VD = dtable, .x_TD = x, .w_VD = table, .targets_T = ids});
  ops::embedding_backward(s, dtable, y, ids, 1.0f);
  ops::add(s, x, y);
  ops::copy(s, y, x);
  ops::sum(s, losses);
  const Buffer m = allocate(memory, DType::kF32, {kVocab, kWidth});
  const Buffer v = allocate(memory, DType::kF32, {kVocab, kWidth});
  ops::fill(s, m, 0);
  ops::fill(s, v, 0);
  const Buffer stats =
      memory.allocate(MemoryClass::kOptimizer, "stats", DType::kF64, {ops::kStepStats});
  ops::fill(s, stats, 0);
  ops::add_squared_norm(s, stats.tensor().row_range(ops::kSquaredNorm, 1), dtable);
  ops::finish_step(s, stats, 1, 0.9, 0.95);
  ops::adamw(s, {.w_N = table, .m_N = m, .v_N = v, .grad_N = dtable, .stats = stats});
  std::vector<float> host(kTokens);
  ops::copy_from_host(s, losses, host.data());
  ops::copy_to_host(s, host.data(), losses);
  ops::synchronize(s);
}

TEST(Planning, RealOpsTakeThePlannedScratch) {
  Memory plan(Backend::kPlan);
  run_every_op(plan);
  const MemoryReport report = plan.report();
  ASSERT_EQ(report.programs.size(), 1u);
  Memory memory(Backend::kCpu);
  memory.adopt_plan(plan);
  for (int run = 0; run < 2; ++run) run_every_op(memory);
}

TEST(Planning, LogitsAppearUnderTheirClass) {
  Memory plan(Backend::kPlan);
  {
    const ProgramScope program(plan, "loss");
    Stream s(plan);
    const Buffer x = allocate(plan, DType::kF32, {4096, 8});
    const Buffer w = allocate(plan, DType::kF32, {32768, 8});
    const Buffer loss = allocate(plan, DType::kF32, {4096});
    const Buffer ids = allocate(plan, DType::kI32, {4096});
    ops::linear_cross_entropy(s, {.loss_T = loss, .x_TD = x, .w_VD = w, .targets_T = ids});
  }
  const auto logits = plan.report().programs[0].at_peak[static_cast<int>(MemoryClass::kLogits)];
  EXPECT_EQ(logits, size_t{64} * 32768 * 4);
}

TEST(Planning, ABuildWithoutCudaSaysSo) {
  if (kHasCuda) GTEST_SKIP() << "this build has the CUDA backend";
  Memory memory(Backend::kCuda);
  Stream s(memory);
  try {
    ops::fill(s, Tensor(nullptr, DType::kF32, {1}), 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "fill: this build has no cuda backend");
  }
}

}  // namespace
}  // namespace sbtrain
