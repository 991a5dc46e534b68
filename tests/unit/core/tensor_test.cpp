#include "core/tensor.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

TEST(Tensor, ShapeOfAFreshView) {
  std::vector<float> data(24);
  const Tensor t(data.data(), DType::kF32, {4, 2, 3});
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.rows(), 4);
  EXPECT_EQ(t.cols(), 6);
  EXPECT_EQ(t.numel(), 24);
  EXPECT_EQ(t.bytes(), 96u);
  EXPECT_EQ(t.row_stride, 6);
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(t.describe(), "f32[4, 2, 3]");
  EXPECT_EQ(Tensor(nullptr, DType::kBF16, {5}).bytes(), 10u);
  EXPECT_FALSE(Tensor().defined());
  EXPECT_EQ(Tensor().numel(), 0);
}

TEST(Tensor, RangesPointIntoTheSameMemory) {
  std::vector<float> data(20);
  const Tensor t(data.data(), DType::kF32, {4, 5});
  const Tensor rows = t.row_range(1, 2);
  EXPECT_EQ(rows.f32(), data.data() + 5);
  EXPECT_EQ(rows.rows(), 2);
  EXPECT_TRUE(rows.contiguous());
  const Tensor cols = t.col_range(2, 3);
  EXPECT_EQ(cols.f32(), data.data() + 2);
  EXPECT_EQ(cols.cols(), 3);
  EXPECT_EQ(cols.row_stride, 5);
  EXPECT_FALSE(cols.contiguous());
  const Tensor corner = cols.row_range(3, 1).col_range(2, 1);
  EXPECT_EQ(corner.f32(), data.data() + 19);
  EXPECT_EQ(t.row_range(4, 0).numel(), 0);
}

TEST(Tensor, Reshape) {
  std::vector<float> data(12);
  const Tensor t(data.data(), DType::kF32, {3, 4});
  const Tensor r = t.reshaped({2, 3, 2});
  EXPECT_EQ(r.f32(), data.data());
  EXPECT_EQ(r.row_stride, 6);
  EXPECT_THROW(t.reshaped({5, 2}), Error);
  EXPECT_THROW(t.col_range(0, 2).reshaped({6}), Error);
}

TEST(Tensor, MisuseThrows) {
  const Tensor t(nullptr, DType::kF32, {3, 4});
  EXPECT_THROW(t.row_range(2, 2), Error);
  EXPECT_THROW(t.row_range(-1, 1), Error);
  EXPECT_THROW(t.col_range(3, 2), Error);
  EXPECT_THROW(t.i32(), Error);
  EXPECT_THROW(t.bf16(), Error);
  EXPECT_THROW(Tensor(nullptr, DType::kF32, {1, 1, 1, 1, 1}), Error);
}

TEST(Tensor, PlannedTensorsHaveNoData) {
  const Tensor t(nullptr, DType::kF32, {3, 4});
  EXPECT_EQ(t.f32(), nullptr);
  EXPECT_EQ(t.row_range(1, 2).data, nullptr);
  EXPECT_EQ(t.col_range(1, 2).data, nullptr);
}

}  // namespace
}  // namespace sbtrain
