// The tensor core products, their accumulators, and the conversions between operands.
#include <bit>
#include <cmath>

#include "gpu/device.h"
#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/mma.cuh"

namespace sbtrain::test::mma_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Mma = GpuTest;

// Small integers, so that products are exact; different in every row and column.
int a_at(int row, int k) {
  return (row * 5 + k * 3) % 17 - 8;
}
int b_at(int k, int col) {
  return (k * 7 + col * 11) % 13 - 6;
}
float c_at(int row, int col) {
  return static_cast<float>(row * 8 + col);
}
uint32_t bf16_bits(int x) {
  return std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16;
}

__global__ void bf16_kernel(float* c, const uint32_t* a, const uint32_t* b) {
  const int i = static_cast<int>(threadIdx.x);
  float sum[4];
  for (int n = 0; n < 4; ++n) sum[n] = c[i * 4 + n];
  mma_m16n8k16_bf16(sum, {a[i * 4], a[i * 4 + 1], a[i * 4 + 2], a[i * 4 + 3]}, b[i * 2],
                    b[i * 2 + 1]);
  for (int n = 0; n < 4; ++n) c[i * 4 + n] = sum[n];
}
__global__ void tf32_kernel(float* c, const uint32_t* a, const uint32_t* b) {
  const int i = static_cast<int>(threadIdx.x);
  float sum[4];
  for (int n = 0; n < 4; ++n) sum[n] = c[i * 4 + n];
  mma_m16n8k8_tf32(sum, {a[i * 4], a[i * 4 + 1], a[i * 4 + 2], a[i * 4 + 3]}, b[i * 2],
                   b[i * 2 + 1]);
  for (int n = 0; n < 4; ++n) c[i * 4 + n] = sum[n];
}

std::vector<float> accumulators() {
  std::vector<float> c;
  for (int n = 0; n < 32 * 4; ++n) {
    const int lane = n / 4, i = n % 4;
    c.push_back(c_at(lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2));
  }
  return c;
}
void expect_product(const std::vector<float>& got, int inner) {
  for (int n = 0; n < 32 * 4; ++n) {
    const int row = n / 4 / 4 + n % 4 / 2 * 8, col = n / 4 % 4 * 2 + n % 2;
    float want = c_at(row, col);
    for (int k = 0; k < inner; ++k) want += static_cast<float>(a_at(row, k) * b_at(k, col));
    EXPECT_EQ(got[static_cast<size_t>(n)], want) << row << ", " << col;
  }
}

TEST_F(Mma, MultipliesBf16) {
  std::vector<uint32_t> a, b;
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = c + i / 2 * 8;
      a.push_back(bf16_bits(a_at(row, k)) | bf16_bits(a_at(row, k + 1)) << 16);
    }
    for (int i = 0; i < 2; ++i) {
      b.push_back(bf16_bits(b_at(c + i * 8, g)) | bf16_bits(b_at(c + i * 8 + 1, g)) << 16);
    }
  }
  OnDevice<uint32_t> on_a(a), on_b(b);
  OnDevice<float> c(accumulators());
  bf16_kernel<<<1, 32>>>(c.data(), on_a.data(), on_b.data());
  expect_product(c.values(), 16);
}

TEST_F(Mma, MultipliesTf32) {
  std::vector<uint32_t> a, b;
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int x = a_at(g + i % 2 * 8, q + i / 2 * 4);
      a.push_back(std::bit_cast<uint32_t>(static_cast<float>(x)));
    }
    for (int i = 0; i < 2; ++i) {
      b.push_back(std::bit_cast<uint32_t>(static_cast<float>(b_at(q + i * 4, g))));
    }
  }
  OnDevice<uint32_t> on_a(a), on_b(b);
  OnDevice<float> c(accumulators());
  tf32_kernel<<<1, 32>>>(c.data(), on_a.data(), on_b.data());
  expect_product(c.values(), 8);
}

__global__ void convert_kernel(uint32_t* operands, uint32_t* tf32, const float* x) {
  const int i = static_cast<int>(threadIdx.x);
  const float* const mine = x + i * 8;
  uint32_t a[4];
  accumulator_as_a(a, {mine[0], mine[1], mine[2], mine[3]}, {mine[4], mine[5], mine[6], mine[7]});
  for (int n = 0; n < 4; ++n) operands[i * 4 + n] = a[n];
  for (int n = 0; n < 8; ++n) tf32[i * 8 + n] = to_tf32(mine[n]);
}

// x rounded to the nearest number with `bits` bits of mantissa; ties go to even if `to_even`.
float rounded(float x, int bits, bool to_even) {
  int exponent = 0;
  const double scaled = std::ldexp(std::frexp(static_cast<double>(x), &exponent), bits + 1);
  const double whole = to_even ? std::nearbyint(scaled) : std::round(scaled);
  return static_cast<float>(std::ldexp(whole, exponent - bits - 1));
}

TEST_F(Mma, AccumulatorsBecomeOperands) {
  std::vector<float> x;
  for (int i = 0; i < 32 * 8; ++i) {
    // Some lie halfway between two numbers of bf16 or of tf32.
    const float halves[] = {1.0f + 0x1p-8f, -1.0f - 3 * 0x1p-8f, 1.0f + 0x1p-11f, 3.14159f};
    x.push_back(i % 5 == 0 ? halves[i / 5 % 4] : std::sin(static_cast<float>(i)) * 100.0f);
  }
  OnDevice<float> in(x);
  OnDevice<uint32_t> operands(32 * 4), tf32(32 * 8);
  convert_kernel<<<1, 32>>>(operands.data(), tf32.data(), in.data());
  const std::vector<uint32_t> a = operands.values(), t = tf32.values();
  for (size_t i = 0; i < x.size(); ++i) {
    // Element (g + 8 j, 8 n + c + half) of the two blocks is number 4 n + 2 j + half of the lane,
    // and half `half` of register 2 n + j.
    const uint32_t half = a[i / 8 * 4 + i % 8 / 2] >> (i % 2 * 16) & 0xffff;
    EXPECT_EQ(std::bit_cast<float>(half << 16), rounded(x[i], 7, true)) << i;
    // Products do not read the other 13 bits.
    EXPECT_EQ(std::bit_cast<float>(t[i] & ~0x1fffu), rounded(x[i], 10, false)) << i;
  }
}

__global__ void accumulator_kernel(float* of_row, float* cleared) {
  Accumulator<2, 3> x;
  const int lane_index = static_cast<int>(threadIdx.x);
  x.clear();
  float sum = 0.0f;
  x.for_each([&](float value, auto) { sum += value; });
  cleared[lane_index] = sum;
  x.for_each([](float& value, auto at) {
    value = static_cast<float>(at.lane_row * 10000 + at.row * 100 + at.col);
  });
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int t = 0; t < 6; ++t) of_row[(lane_index * 4 + i) * 6 + t] = x.of_row(i, t);
  }
}

TEST_F(Mma, AccumulatorsKnowTheirElements) {
  OnDevice<float> of_row(32 * 4 * 6), cleared(32);
  accumulator_kernel<<<1, 32>>>(of_row.data(), cleared.data());
  const std::vector<float> got = of_row.values();
  for (int n = 0; n < 32 * 4 * 6; ++n) {
    const int lane = n / 24, i = n / 6 % 4, t = n % 6;
    const int row = lane / 4 + 8 * i, col = lane % 4 * 2 + t / 2 * 8 + t % 2;
    EXPECT_EQ(got[static_cast<size_t>(n)], static_cast<float>(i * 10000 + row * 100 + col)) << n;
  }
  EXPECT_EQ(cleared.values(), std::vector<float>(32, 0.0f));
}

}  // namespace
}  // namespace sbtrain::test::mma_test
