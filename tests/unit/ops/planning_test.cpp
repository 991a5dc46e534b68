// Ops on Backend::kPlan read and write nothing, and take the same scratch as on a real backend;
// otherwise the replay below would throw.
#include <gtest/gtest.h>

#include "core/device.h"
#include "core/error.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/coca.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rebased.h"
#include "ops/rope.h"
#include "ops/short_conv.h"

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
  const ops::RopeParams rope = {.heads = 2,
                                .frequencies = ops::rope_frequencies(10000, kWidth / 2)};
  ops::run(s, ops::Rope{.x_THd = x, .positions_T = ids, .params = rope});
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
  ops::run(s, ops::LayerNorm{.y_TD = y, .x_TD = x, .w_D = row, .b_D = drow, .eps = 1e-5f});
  ops::run(s, ops::LayerNormBackward{.dx_TD = y,
                                     .dw_D = drow,
                                     .db_D = row,
                                     .dy_TD = x,
                                     .x_TD = x,
                                     .w_D = row,
                                     .eps = 1e-5f,
                                     .accumulate = true});
  ops::run(s, ops::AddBias{.y_TN = y, .b_N = row});
  ops::run(s, ops::BiasGelu{.y_TF = y, .x_TF = x, .b_F = row});
  ops::run(s, ops::BiasGeluBackward{.dx_TF = y, .dy_TF = x, .x_TF = x, .b_F = row});
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

// Every op that mixes tokens: attention, the transforms of CoCA, the short convolution, and a step
// of decoding, on tensors of one program.
void run_every_mixer(Memory& memory) {
  Stream s(memory);
  const ProgramScope program(memory, "mixers");
  constexpr int kHeads = 2;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    Buffer b = allocate(memory, DType::kF32, {rows, cols});
    ops::run(s, ops::Fill{.x = b, .value = 0.25f});
    return b;
  };
  const auto integers = [&](const std::vector<int32_t>& values) {
    Buffer b = allocate(memory, DType::kI32, {static_cast<int64_t>(values.size())});
    ops::run(s, ops::CopyFromHost{.y = b, .host = values.data()});
    return b;
  };
  std::vector<int32_t> counted(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) counted[t] = static_cast<int32_t>(t);
  const Buffer positions = integers(counted);
  const Buffer bounds = integers({0, kTokens});
  const Sequences sequences = {
      .cu_seqlens = bounds, .positions_T = positions, .count = 1, .max_seqlen = kTokens};
  const Buffer q = matrix(kTokens, kWidth), k = matrix(kTokens, kWidth);
  const Buffer v = matrix(kTokens, kWidth), o = matrix(kTokens, kWidth);
  const Buffer dq = matrix(kTokens, kWidth), dk = matrix(kTokens, kWidth);
  const Buffer dv = matrix(kTokens, kWidth), per_query = matrix(kHeads, kTokens);
  const Buffer stop = allocate(memory, DType::kI32, {kHeads, kTokens});

  ops::run(s, ops::StickBreakingForward{.o_THd = o,
                                        .log2_rem_HT = per_query,
                                        .stop_HT = stop,
                                        .q_THd = q,
                                        .k_THd = k,
                                        .v_THd = v,
                                        .sequences = sequences,
                                        .params = {.heads = kHeads}});
  ops::run(s, ops::StickBreakingBackward{.dq_THd = dq,
                                         .dk_THd = dk,
                                         .dv_THd = dv,
                                         .do_THd = o,
                                         .log2_rem_HT = per_query,
                                         .stop_HT = stop,
                                         .q_THd = q,
                                         .k_THd = k,
                                         .v_THd = v,
                                         .sequences = sequences,
                                         .params = {.heads = kHeads}});
  for (const auto kind : {ops::PositionBias::kNone, ops::PositionBias::kAlibi}) {
    ops::run(s, ops::SoftmaxForward{.o_THd = o,
                                    .lse_HT = per_query,
                                    .q_THd = q,
                                    .k_THd = k,
                                    .v_THd = v,
                                    .bias = {.kind = kind},
                                    .sequences = sequences,
                                    .params = {.heads = kHeads}});
    ops::run(s, ops::SoftmaxBackward{.dq_THd = dq,
                                     .dk_THd = dk,
                                     .dv_THd = dv,
                                     .do_THd = v,
                                     .o_THd = o,
                                     .lse_HT = per_query,
                                     .q_THd = q,
                                     .k_THd = k,
                                     .v_THd = v,
                                     .bias = {.kind = kind},
                                     .sequences = sequences,
                                     .params = {.heads = kHeads}});
  }
  ops::run(s, ops::RebasedForward{.o_THe = o,
                                  .den_HT = per_query,
                                  .q_THf = q,
                                  .k_THf = k,
                                  .v_THe = v,
                                  .sequences = sequences,
                                  .params = {.heads = kHeads}});
  ops::run(s, ops::RebasedBackward{.dq_THf = dq,
                                   .dk_THf = dk,
                                   .dv_THe = dv,
                                   .do_THe = v,
                                   .o_THe = o,
                                   .den_HT = per_query,
                                   .q_THf = q,
                                   .k_THf = k,
                                   .v_THe = v,
                                   .sequences = sequences,
                                   .params = {.heads = kHeads}});
  const ops::CocaParams coca = {
      .rope = {.heads = kHeads,
               .frequencies = ops::rope_frequencies(10000, q.tensor().cols() / kHeads)}};
  ops::run(s, ops::CocaQuery{.y_THd = o, .q_THd = q, .positions_T = positions, .params = coca});
  ops::run(s, ops::CocaQueryBackward{
                  .dq_THd = dq, .dy_THd = o, .q_THd = q, .positions_T = positions, .params = coca});
  ops::run(s, ops::CocaKey{.y_THd = o, .t_THd = k, .positions_T = positions, .params = coca});
  ops::run(s, ops::CocaKeyBackward{
                  .dt_THd = dk, .dy_THd = v, .y_THd = o, .positions_T = positions, .params = coca});
  const Buffer taps = matrix(kWidth, ops::kShortConv), row = matrix(1, kWidth);
  const ops::ShortConvWeights w = {.w_D3 = taps, .b_D = row, .gate_bias_D = row};
  ops::run(s, ops::ShortConvForward{
                  .y_TD = o, .u_TD = q, .gate_TD = k, .positions_T = positions, .w = w});
  ops::run(s, ops::ShortConvBackward{.du_TD = dq,
                                     .dgate_TD = dk,
                                     .dy_TD = o,
                                     .u_TD = q,
                                     .gate_TD = k,
                                     .positions_T = positions,
                                     .dw = w,
                                     .w = w});

  const Tensor one = q.tensor().row_range(0, 1), new_o = o.tensor().row_range(0, 1);
  const Tensor cache = k.tensor().reshaped({1, kTokens, kWidth});
  const Buffer length = integers({kTokens}), position = integers({3});
  ops::run(s, ops::CacheAppend{.cache_BCN = cache, .x_BN = one, .positions_B = position});
  ops::run(s, ops::StickBreakingDecode{.o_BHd = new_o,
                                       .q_BHd = one,
                                       .k_cache_BCGd = cache,
                                       .v_cache_BCGd = cache,
                                       .lengths_B = length,
                                       .params = {.heads = kHeads}});
  ops::run(s, ops::SoftmaxDecode{.o_BHd = new_o,
                                 .q_BHd = one,
                                 .k_cache_BCGd = cache,
                                 .v_cache_BCGd = cache,
                                 .lengths_B = length,
                                 .params = {.heads = kHeads}});
  constexpr int64_t kHeadDim = kWidth / kHeads;
  const ops::RebasedParams params = {.heads = kHeads};
  const Buffer state = matrix(kHeads * ops::rebased_state_rows(kHeadDim, params), kHeadDim + 1);
  ops::run(s, ops::RebasedState{.state_Re = state, .k_THf = k, .v_THe = v, .params = params});
  ops::run(s, ops::RebasedDecode{.o_BHe = new_o,
                                 .q_BHf = one,
                                 .k_BHf = one,
                                 .v_BHe = one,
                                 .state_BRe = state,
                                 .positions_B = position,
                                 .params = params});
  const Buffer before = matrix(1, 2 * kWidth);
  ops::run(s, ops::ShortConvDecode{.y_BD = new_o,
                                   .u_BD = one,
                                   .gate_BD = one,
                                   .state_B2D = before,
                                   .positions_B = position,
                                   .w = w});
}

TEST(Planning, RealOpsTakeThePlannedScratch) {
  for (const auto& run_ops : {run_every_op, run_every_mixer}) {
    Memory plan(Backend::kPlan);
    run_ops(plan);
    const MemoryReport report = plan.report();
    ASSERT_EQ(report.programs.size(), 1u);
    Memory memory(Backend::kCpu);
    memory.adopt_plan(plan);
    for (int run = 0; run < 2; ++run) run_ops(memory);
  }
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
  if (has_cuda()) GTEST_SKIP() << "this build has the CUDA backend";
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
