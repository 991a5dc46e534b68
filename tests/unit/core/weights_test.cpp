#include "core/weights.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

TEST(Weights, FindsByNameAndFusesNeighbours) {
  std::vector<float> data(60);
  Weights w;
  w.add("q", Tensor(data.data(), DType::kF32, {2, 5}));
  w.add("k", Tensor(data.data() + 10, DType::kF32, {3, 5}));
  w.add("v", Tensor(data.data() + 25, DType::kF32, {4, 5}));
  w.add("norm", Tensor(data.data() + 45, DType::kF32, {5}));
  EXPECT_TRUE(w.has("k"));
  EXPECT_FALSE(w.has("o"));
  EXPECT_EQ(w.at("v").f32(), data.data() + 25);
  EXPECT_EQ(w.fused("q", 3).describe(), "f32[9, 5]");
  EXPECT_EQ(w.fused("q", 3).f32(), data.data());
  EXPECT_THROW(w.at("o"), Error);
  EXPECT_THROW(w.fused("v", 3), Error);
  EXPECT_THROW(w.fused("v", 2), Error);  // other columns
}

}  // namespace
}  // namespace sbtrain
