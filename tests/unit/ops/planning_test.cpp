// Ops on Backend::kPlan: nothing is read or written, and the same scratch is taken as by the
// real ops, or the replay below would throw.
#include <gtest/gtest.h>

#include "core/device.h"
#include "core/error.h"
#include "ops/activation.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

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
  for (const Buffer* b : {&x, &wide, &square, &row, &drow, &table, &dtable})
    ops::run(s, ops::Fill{.x = *b, .value = 0.5f});
  ops::run(s, ops::Fill{.x = ids, .value = 1});

  ops::run(s, ops::Embedding{.y_TD = x, .tokens_T = ids, .w_VD = table, .scale = 1.0f});
  ops::run(s, ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = row, .eps = 1e-5f});
  ops::run(s, ops::RmsNormBackward{
                  .dx_TD = x, .dw_D = drow, .dy_TD = y, .x_TD = x, .w_D = row, .eps = 1e-5f});
  ops::run(s, ops::HeadNorm{
                  .y_THd = y, .x_THd = x, .w_Hd = row, .b_Hd = drow, .heads = 2, .eps = 1e-5f});
  ops::run(s, ops::HeadNormBackward{.dx_THd = y,
                                    .dw_Hd = drow,
                                    .db_Hd = row,
                                    .dy_THd = x,
                                    .x_THd = x,
                                    .w_Hd = row,
                                    .heads = 2,
                                    .eps = 1e-5f});
  ops::run(s, ops::Linear{.y_TN = y, .x_TK = x, .w_NK = square, .residual = x});
  ops::run(s, ops::LinearBackwardInput{.dx_TK = y, .dy_TN = x, .w_NK = square});
  ops::run(s, ops::LinearBackwardWeight{.dw_NK = square, .dy_TN = y, .x_TK = x});
  ops::run(s, ops::BiasBackward{.db_N = drow, .dy_TN = y});
  ops::run(s, ops::Swiglu{.y_TF = y, .gate_up_T2F = wide});
  ops::run(s, ops::SwigluBackward{.dgate_up_T2F = dwide, .dy_TF = y, .gate_up_T2F = wide});
  ops::run(s, ops::BiasSigmoid{.y_TH = y, .x_TH = x, .b_H = row});
  ops::run(s, ops::SigmoidBackward{.dx_TH = x, .dy_TH = y, .y_TH = y});
  ops::run(s, ops::Rope{.x_THd = x, .positions_T = ids, .params = {.heads = 2}});
  ops::run(s, ops::CrossEntropy{.loss_T = losses,
                                .dx_TD = y,
                                .dw_VD = dtable,
                                .x_TD = x,
                                .w_VD = table,
                                .targets_T = ids});
  ops::run(s, ops::EmbeddingBackward{.dw_VD = dtable, .dy_TD = y, .tokens_T = ids, .scale = 1.0f});
  ops::run(s, ops::Add{.y = x, .x = y});
  ops::run(s, ops::Copy{.y = y, .x = x});
  ops::sum(s, losses);
  const Buffer m = allocate(memory, DType::kF32, {kVocab, kWidth});
  const Buffer v = allocate(memory, DType::kF32, {kVocab, kWidth});
  ops::run(s, ops::Fill{.x = m, .value = 0});
  ops::run(s, ops::Fill{.x = v, .value = 0});
  const Buffer stats =
      memory.allocate(MemoryClass::kOptimizer, "stats", DType::kF64, {ops::kStepStats});
  ops::run(s, ops::Fill{.x = stats, .value = 0});
  ops::run(s,
           ops::AddSquaredNorm{.y_1 = stats.tensor().row_range(ops::kSquaredNorm, 1), .x = dtable});
  ops::run(s, ops::FinishStep{.stats = stats, .clip = 1, .beta1 = 0.9, .beta2 = 0.95});
  ops::run(s, ops::AdamW{.w_N = table, .m_N = m, .v_N = v, .grad_N = dtable, .stats = stats});
  std::vector<float> host(kTokens);
  ops::run(s, ops::CopyFromHost{.y = losses, .host = host.data()});
  ops::run(s, ops::CopyToHost{.host = host.data(), .x = losses});
  ops::run(s, ops::Synchronize{});
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
    ops::run(s, ops::CrossEntropy{.loss_T = loss, .x_TD = x, .w_VD = w, .targets_T = ids});
  }
  const auto logits = plan.report().programs[0].at_peak[static_cast<int>(MemoryClass::kLogits)];
  EXPECT_EQ(logits, size_t{64} * 32768 * 4);
}

TEST(Planning, ABuildWithoutCudaSaysSo) {
  if (kHasCuda) GTEST_SKIP() << "this build has the CUDA backend";
  Memory memory(Backend::kCuda);
  Stream s(memory);
  try {
    ops::run(s, ops::Fill{.x = Tensor(nullptr, DType::kF32, {1}), .value = 0});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "fill: this build has no cuda backend");
  }
}

}  // namespace
}  // namespace sbtrain
