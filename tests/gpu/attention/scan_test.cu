// The scan of stick-breaking attention against its definition in double precision, for every number
// of keys that a main loop may take and for the accumulators of mma.sync and of wgmma.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "gpu/device.h"
#include "kernels/attention/score_stickbreaking_backward.cuh"
#include "kernels/attention/score_stickbreaking_forward.cuh"
#include "kernels/attention/visibility.cuh"
#include "kernels/primitives/accumulator.cuh"

namespace sbtrain::test::scan_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Scan = GpuTest;

constexpr int kRows = 16;  // of a single warp
constexpr int kBlocks = 3;
constexpr float kScale = 1.5f;  // of the scores, in units of ln 2

// The layout in which a warp of a warpgroup holds its 16 rows of a wgmma accumulator.
template <int kKeys>
struct WarpgroupFragment {
  float d[kKeys / 2];
  __device__ float& of_row(int i, int t) { return d[t / 2 * 4 + i * 2 + t % 2]; }
  __device__ const float& of_row(int i, int t) const { return d[t / 2 * 4 + i * 2 + t % 2]; }
};

// Row j sees the keys from j / 3 up to the row's end.
struct Seen {
  int first_row, keys;
  __device__ __host__ static int begin(int row) { return row / 3; }
  __device__ __host__ static int end(int row, int keys) { return keys - 20 + row; }
  __device__ KeyRange range(int i) const {
    const int row = first_row + 8 * i;
    return {begin(row), end(row, keys)};
  }
  __device__ bool all(int block, int count) const {
    return block >= begin(kRows - 1) && block + count <= end(0, keys);
  }
};

struct Tensors {
  const float *z, *dp, *gates, *drem;  // [rows, keys], [rows, keys], [keys], [rows]
  float *a, *dz, *left, *log2_left, *dgate;
};

// Loads or stores the block of keys from `block` on, in the order that a permuted tile gives it.
template <int kKeys, typename Body>
__device__ void for_each_score(int block, Body&& body) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int t = 0; t < kKeys / 4; ++t) {
      const int column = t / 2 * 8 + lane_col() + t % 2;
      const int row = lane_row() + 8 * i;
      body(i, t, row * kBlocks * kKeys + block + key_of_row<kKeys>(column));
    }
  }
}

template <int kKeys, bool kGated, typename Fragment>
__global__ void scan_kernel(const Tensors x) {
  const Seen seen{lane_row(), kBlocks * kKeys};
  Sticks<2, kKeys, kGated> sticks;
  for (int block = (kBlocks - 1) * kKeys; block >= 0; block -= kKeys) {
    Fragment s;
    for_each_score<kKeys>(block, [&](int i, int t, int at) { s.of_row(i, t) = x.z[at]; });
    sticks.score(s, block, kScale, seen, x.gates + block);
    for_each_score<kKeys>(block, [&](int i, int t, int at) { x.a[at] = s.of_row(i, t); });
  }
  StickGradients<2, kKeys, kGated> gradients;
  for (int i = 0; i < 2; ++i) {
    const int row = lane_row() + 8 * i;
    x.left[row] = sticks.left[i];
    x.log2_left[row] = quad_sum(sticks.log2_left[i]);
    gradients.begin(i, x.log2_left[row], x.drem[row]);
  }
  for (int block = 0; block < kBlocks * kKeys; block += kKeys) {
    Fragment s, dp;
    for_each_score<kKeys>(block, [&](int i, int t, int at) {
      s.of_row(i, t) = x.z[at];
      dp.of_row(i, t) = x.dp[at];
    });
    float dgate[kKeys / 4] = {};
    gradients.score(s, dp, block, kScale, seen, x.gates + block, kGated ? dgate : nullptr);
    for_each_score<kKeys>(block, [&](int i, int t, int at) { x.dz[at] = dp.of_row(i, t); });
    for (int t = 0; t < kKeys / 4; ++t) {  // over the rows: lanes of equal quad_lane()
      for (int step = 4; step < 32; step *= 2) dgate[t] += __shfl_xor_sync(~0u, dgate[t], step);
      if (lane() < 4) x.dgate[block + kKeys / 4 * quad_lane() + t] = dgate[t];
    }
  }
}

std::vector<float> numbers(size_t count, double frequency, double size, double mean) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    x[i] =
        static_cast<float>(mean + size * std::sin(frequency * static_cast<double>(i * i % 9973)));
  }
  return x;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double bound,
                 const std::string& what) {
  double largest = std::numeric_limits<float>::min();  // what is smaller may become 0
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], bound * largest) << what << " " << i;
  }
}

template <int kKeys, bool kGated, typename Fragment>
void check(double mean) {
  constexpr int kAll = kBlocks * kKeys;
  const std::vector<float> z = numbers(kRows * kAll, 0.37, 2.0, mean);
  const std::vector<float> dp = numbers(kRows * kAll, 0.11, 1.0, 0.1);
  std::vector<float> gates = numbers(kAll, 0.53, 0.45, 0.5);
  const std::vector<float> drem = numbers(kRows, 0.71, 1.0, 0.0);
  if (!kGated) std::fill(gates.begin(), gates.end(), 1.0f);

  std::vector<double> a(kRows * kAll), dz(kRows * kAll), left(kRows), dgate(kAll);
  for (int row = 0; row < kRows; ++row) {
    double stick = 1.0, c = 0.0;
    const auto at = [&](int key) { return static_cast<size_t>(row * kAll + key); };
    const auto sigma = [&](int key) {
      return 1.0 / (1.0 + std::exp2(-static_cast<double>(z[at(key)]) * kScale));
    };
    const int begin = Seen::begin(row), end = Seen::end(row, kAll);
    for (int key = end - 1; key >= begin; --key) {
      const double beta = gates[static_cast<size_t>(key)] * sigma(key);
      a[at(key)] = beta * stick;
      stick *= 1.0 - beta;
    }
    left[static_cast<size_t>(row)] = stick;
    for (int key = begin; key < end; ++key) {
      const double f = gates[static_cast<size_t>(key)], beta = f * sigma(key);
      const double g =
          a[at(key)] * (dp[at(key)] - static_cast<double>(drem[static_cast<size_t>(row)]));
      const double dbeta = g / beta - c / (1.0 - beta);
      dz[at(key)] = dbeta * f * sigma(key) * (1.0 - sigma(key));
      dgate[static_cast<size_t>(key)] += dbeta * sigma(key);
      c += g;
    }
  }

  OnDevice<float> on_z(z), on_dp(dp), on_gates(gates), on_drem(drem), on_a(a.size()),
      on_dz(dz.size()), on_left(kRows), on_log2(kRows), on_dgate(kAll);
  scan_kernel<kKeys, kGated, Fragment>
      <<<1, 32>>>({on_z.data(), on_dp.data(), on_gates.data(), on_drem.data(), on_a.data(),
                   on_dz.data(), on_left.data(), on_log2.data(), on_dgate.data()});
  const std::string what = std::to_string(kKeys) + (kGated ? " keys, gated, " : " keys, ");
  expect_near(on_a.values(), a, 1e-5, what + "A");
  expect_near(on_left.values(), left, 3e-5, what + "left");
  expect_near(on_dz.values(), dz, 5e-4, what + "dz");
  if (kGated) expect_near(on_dgate.values(), dgate, 5e-4, what + "dgate");
  const std::vector<float> log2_left = on_log2.values();
  for (size_t row = 0; row < kRows; ++row) {
    EXPECT_NEAR(log2_left[row], std::log2(left[row]), 1e-4 * (1 + std::abs(std::log2(left[row]))))
        << what << row;
  }
}

template <int kKeys>
void check_all() {
  for (const double mean : {-4.0, -1.0}) {
    check<kKeys, false, Accumulator<1, kKeys / 8>>(mean);
    check<kKeys, true, Accumulator<1, kKeys / 8>>(mean);
    check<kKeys, false, WarpgroupFragment<kKeys>>(mean);
    check<kKeys, true, WarpgroupFragment<kKeys>>(mean);
  }
}

TEST_F(Scan, OfAnyNumberOfKeysIsTheDefinition) {
  check_all<32>();
  check_all<64>();
  check_all<128>();
}

// Each lane of a quad holds neighbouring keys, and every key has one row of the tile.
__global__ void order_kernel(int* of_32, int* of_64, int* of_128) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < 32) of_32[row] = key_of_row<32>(row);
  if (row < 64) of_64[row] = key_of_row<64>(row);
  of_128[row] = key_of_row<128>(row);
}

TEST_F(Scan, KeysOfALaneAreNeighbours) {
  OnDevice<int> of_32(32), of_64(64), of_128(128);
  order_kernel<<<1, 128>>>(of_32.data(), of_64.data(), of_128.data());
  for (const std::vector<int>& order : {of_32.values(), of_64.values(), of_128.values()}) {
    const int keys = static_cast<int>(order.size());
    for (int q = 0; q < 4; ++q) {
      for (int t = 0; t < keys / 4; ++t) {
        const int column = t / 2 * 8 + q * 2 + t % 2;
        EXPECT_EQ(order[static_cast<size_t>(column)], q * keys / 4 + t) << keys;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::test::scan_test
