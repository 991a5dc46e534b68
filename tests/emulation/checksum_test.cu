// A number of all bits of a matrix, emulated (emulator.h): it tells apart what differs, and nothing
// else.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/checksum.cu"
#include "support/tensors.h"

namespace sbtrain::emulation {
namespace {

uint64_t checksum(const std::vector<float>& x, int64_t rows, int64_t cols, int64_t stride) {
  uint64_t sum = 0;
  launch(nullptr, kernels::Checksum{&sum, {x.data(), stride}, kernels::Type::kF32, rows, cols});
  return sum;
}

TEST(EmulatedChecksum, IsOfTheBitsAndTheirPlaces) {
  for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 5}, {70, 33}, {9, 1024}}) {
    const test::Owned values = test::random_normal("x", {rows, cols});
    std::vector<float> x(values.f32(), values.f32() + rows * cols);
    const uint64_t sum = checksum(x, rows, cols, cols);
    EXPECT_EQ(checksum(x, rows, cols, cols), sum);
    // What stands between the rows does not count.
    std::vector<float> spread(static_cast<size_t>(rows) * (cols + 3), NAN);
    for (int i = 0; i < rows; ++i) {
      std::copy_n(x.begin() + i * cols, cols, spread.begin() + i * (cols + 3));
    }
    EXPECT_EQ(checksum(spread, rows, cols, cols + 3), sum);
    // The last bit of any element does.
    for (size_t at : {size_t{0}, x.size() / 2, x.size() - 1}) {
      std::vector<float> other = x;
      other[at] = std::nextafter(other[at], INFINITY);
      EXPECT_NE(checksum(other, rows, cols, cols), sum) << at;
    }
    if (x.size() > 1) {
      std::swap(x.front(), x.back());
      EXPECT_NE(checksum(x, rows, cols, cols), sum);
    }
  }
}

TEST(EmulatedChecksum, ReadsBf16) {
  const std::vector<uint16_t> x = {1, 2, 3, 4}, y = {1, 2, 3, 5};
  const auto sum_of = [](const std::vector<uint16_t>& bits) {
    uint64_t sum = 0;
    launch(nullptr, kernels::Checksum{&sum, {bits.data(), 2}, kernels::Type::kBF16, 2, 2});
    return sum;
  };
  EXPECT_EQ(sum_of(x), sum_of(x));
  EXPECT_NE(sum_of(x), sum_of(y));
}

}  // namespace
}  // namespace sbtrain::emulation
