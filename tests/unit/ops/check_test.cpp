// An op takes the types that it says, and does not take f32 for bf16.
#include "ops/check.h"

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/fp8.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/muon.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

using test::Owned;

constexpr int64_t kRows = 4;
constexpr int64_t kWidth = 8;

// The tensors of ops as they are on a GPU, of either type.
struct OfType {
  explicit OfType(DType dtype)
      : matrix(dtype, {kRows, kWidth}),
        wide(dtype, {kRows, 2 * kWidth}),
        square(dtype, {kWidth, kWidth}),
        row(dtype, {kWidth}),
        column(dtype, {kRows}),
        one(dtype, {1}) {}
  Owned matrix, wide, square, row, column, one;
};

class Types : public ::testing::Test {
 protected:
  template <typename Op>
  static void accepts(const Op& op) {
    EXPECT_NO_THROW(op.check()) << Op::kName;
  }
  template <typename Op>
  static void refuses(const Op& op, const std::string& part) {
    try {
      op.check();
      ADD_FAILURE() << Op::kName << " takes " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kInternal);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  OfType f32{DType::kF32}, bf16{DType::kBF16};
  Owned ids{DType::kI32, {kRows}};
};

TEST_F(Types, OfActivationsAreThoseOfTheirWeights) {
  ops::RmsNorm norm{.y_TD = bf16.matrix, .x_TD = bf16.matrix, .w_D = bf16.row, .eps = 1e-5f};
  accepts(norm);
  norm.w_D = f32.row;
  refuses(norm, "rmsnorm: w_D must be 8 contiguous bf16 elements, got f32[8]");

  ops::Linear linear{.y_TN = bf16.matrix, .x_TK = bf16.matrix, .w_NK = bf16.square};
  accepts(linear);
  linear.y_TN = f32.matrix;  // logits, gates
  accepts(linear);
  linear.residual = bf16.matrix;
  refuses(linear, "linear: residual must be f32[4, 8], got bf16[4, 8]");
  linear.residual = {};
  linear.w_NK = f32.square;
  refuses(linear, "linear: w_NK must be bf16[8, 8], got f32[8, 8]");

  ops::Swiglu swiglu{.y_TF = bf16.matrix, .gate_up_T2F = bf16.wide};
  accepts(swiglu);
  swiglu.gate_up_T2F = f32.wide;
  refuses(swiglu, "gate_up_T2F must be bf16");
  refuses(ops::Embedding{.y_TD = bf16.matrix, .tokens_T = ids, .w_VD = f32.square},
          "w_VD must be bf16");
  refuses(ops::RmsNorm{.y_TD = f32.matrix, .x_TD = bf16.matrix, .w_D = bf16.row, .eps = 1e-5f},
          "y_TD must be bf16");
}

TEST_F(Types, OfGradientsOfWeightsAreF32) {
  ops::RmsNormBackward norm{.dx_TD = bf16.matrix,
                            .dw_D = f32.row,
                            .dy_TD = bf16.matrix,
                            .x_TD = bf16.matrix,
                            .w_D = bf16.row,
                            .eps = 1e-5f};
  accepts(norm);
  norm.dw_D = bf16.row;
  refuses(norm, "dw_D must be 8 contiguous f32");
  refuses(ops::BiasBackward{.db_N = bf16.row, .dy_TN = bf16.matrix}, "db_N must be");
  refuses(ops::EmbeddingBackward{.dw_VD = bf16.square, .dy_TD = bf16.matrix, .tokens_T = ids},
          "dw_VD must be f32");

  ops::CrossEntropy loss{.loss_T = f32.column,
                         .dx_TD = bf16.matrix,
                         .dw_VD = f32.square,
                         .x_TD = bf16.matrix,
                         .w_VD = bf16.square,
                         .targets_T = ids};
  accepts(loss);
  loss.dw_VD = bf16.square;
  refuses(loss, "dw_VD must be f32");
  loss.dw_VD = f32.square;
  loss.loss_T = bf16.column;
  refuses(loss, "loss_T must be 4 contiguous f32");
}

TEST_F(Types, OfStatisticsAndOfTheOptimizerAreF32) {
  refuses(ops::Amax{.amax_1 = bf16.one, .x_RC = bf16.matrix}, "amax_1 must be");
  refuses(ops::Swiglu{.y_TF = bf16.matrix, .gate_up_T2F = bf16.wide, .amax_1 = bf16.one},
          "amax_1 must be");
  const Owned stats(DType::kF64, {ops::kStepStats});
  ops::AdamW update{
      .w_N = f32.row, .m_N = f32.row, .v_N = f32.row, .grad_N = f32.row, .stats = stats};
  update.compute_N = bf16.row;
  accepts(update);
  update.grad_N = bf16.row;
  refuses(update, "grad_N must be 8 contiguous f32");
  refuses(ops::AddSum{.y_1 = Owned(DType::kF64, {1}), .x = bf16.row}, "x must be f32");
  ops::Normalize normalize{.y_N = bf16.row, .x_N = bf16.row, .margin = 1};
  accepts(normalize);
  normalize.x_N = f32.row;
  refuses(normalize, "y_N must be 8 contiguous f32");

  const Owned bounds(DType::kI32, {2});
  ops::SoftmaxForward softmax{
      .o_THd = bf16.matrix,
      .lse_HT = f32.column,
      .q_THd = bf16.matrix,
      .k_THd = bf16.matrix,
      .v_THd = bf16.matrix,
      .sequences = {.cu_seqlens = bounds, .positions_T = {}, .count = 1, .max_seqlen = kRows},
      .params = {.heads = 1}};
  const auto one_head = [](const Owned& t) { return t.tensor().reshaped({1, kRows}); };
  softmax.lse_HT = one_head(f32.column);
  accepts(softmax);
  softmax.lse_HT = one_head(bf16.column);
  refuses(softmax, "lse_HT must be f32[1, 4], got bf16[1, 4]");
  softmax.lse_HT = one_head(f32.column);
  softmax.v_THd = f32.matrix;
  refuses(softmax, "v_THd must be bf16");
}

// These mix them by right.
TEST_F(Types, OfCopiesAndOfGatesMayDiffer) {
  accepts(ops::Copy{.y = bf16.matrix, .x = f32.matrix});
  accepts(ops::Copy{.y = f32.matrix, .x = bf16.matrix});
  accepts(ops::Copy{.y = ids, .x = ids});
  refuses(ops::Copy{.y = f32.column, .x = ids}, "copy: x must be");
  accepts(ops::Add{.y = f32.matrix, .x = bf16.matrix});

  accepts(ops::BiasSigmoid{.y_TH = f32.matrix, .x_TH = f32.matrix, .b_H = bf16.row});
  refuses(ops::BiasSigmoid{.y_TH = bf16.matrix, .x_TH = bf16.matrix, .b_H = bf16.row},
          "x_TH must be f32");
  ops::SigmoidBackward sigmoid{.dx_TH = bf16.matrix, .dy_TH = bf16.matrix, .y_TH = f32.matrix};
  accepts(sigmoid);
  sigmoid.dx_TH = f32.matrix;
  refuses(sigmoid, "dx_TH must be bf16");
  sigmoid.dx_TH = bf16.matrix;
  sigmoid.y_TH = bf16.matrix;
  refuses(sigmoid, "y_TH must be f32");
}

}  // namespace
}  // namespace sbtrain
