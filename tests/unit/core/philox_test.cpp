#include "core/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numbers>
#include <set>
#include <vector>

#include "core/sha256.h"
#include "kernels/philox.h"

namespace sbtrain {
namespace {

using Counter = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

// kat_vectors of Random123 1.14, "philox4x32 10".
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32(Counter{0, 0, 0, 0}, Key{0, 0}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32(Counter{kOnes, kOnes, kOnes, kOnes}, Key{kOnes, kOnes}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32(Counter{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       Key{0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, HashIsFnv1a) {
  EXPECT_EQ(hash_name(""), 0xcbf29ce484222325u);
  EXPECT_EQ(hash_name("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(hash_name("foobar"), 0x85944171f73967e8u);
}

// Checkpoints and the order of data depend on these numbers, so they may never change. They were
// computed from the definition, by another program in another language.
TEST(Philox, StreamsAreStable) {
  const std::array<uint64_t, 3> elements = {0, 1, uint64_t{1} << 40};
  const auto expect_stream = [&](const Philox& stream, const std::array<uint64_t, 3>& expected) {
    for (size_t i = 0; i < elements.size(); ++i) {
      EXPECT_EQ(stream.bits64(elements[i]), expected[i]) << elements[i];
      EXPECT_EQ(stream.bits(elements[i]), static_cast<uint32_t>(expected[i] >> 32)) << elements[i];
    }
  };
  expect_stream(Philox(1, RandomPurpose::kInit, "layers.0.weight"),
                {0x2f994b07307397ce, 0xdb1b81d82a75a20b, 0x66e9343db83f640b});
  // Every word of the seed and of the step counts.
  expect_stream(
      Philox(0x123456789abcdef0, RandomPurpose::kDataOrder, "order", (uint64_t{1} << 40) + 7),
      {0x3a2c5180996a7397, 0x14346e692a4aaee4, 0xe42145f18e4d9549});
}

TEST(Philox, EveryPartOfTheKeySeparatesStreams) {
  std::set<uint64_t> first;
  for (const uint64_t seed : {1, 2}) {
    for (const auto purpose : {RandomPurpose::kInit, RandomPurpose::kSampling}) {
      for (const char* name : {"a", "b"}) {
        for (const uint64_t step : {0, 1}) {
          first.insert(Philox(seed, purpose, name, step).bits64(0));
        }
      }
    }
  }
  const Philox stream(1, RandomPurpose::kInit, "a");
  first.insert(stream.bits64(1));
  first.insert(stream.bits64(uint64_t{1} << 32));
  EXPECT_EQ(first.size(), 18u);
}

double mean_of(int n, const std::function<double(uint64_t)>& f) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += f(static_cast<uint64_t>(i));
  return sum / n;
}

TEST(Philox, UniformMoments) {
  const Philox random(7, RandomPurpose::kTest, "uniform");
  constexpr int kCount = 200000;
  // Bounds are five standard errors of each moment.
  const double bound = 5 / std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(mean_of(kCount, [&](uint64_t i) { return random.uniform(i); }), 0.5, bound * 0.289);
  EXPECT_NEAR(mean_of(kCount, [&](uint64_t i) { return std::pow(random.uniform(i), 2); }), 1.0 / 3,
              bound * 0.298);
  EXPECT_NEAR(
      mean_of(kCount, [&](uint64_t i) { return random.uniform(i) * random.uniform(i + 1); }), 0.25,
      bound * 0.22);
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_GE(random.uniform(i), 0.0);
    ASSERT_LT(random.uniform(i), 1.0);
  }
}

TEST(Philox, NormalMoments) {
  const Philox random(7, RandomPurpose::kTest, "normal");
  constexpr int kCount = 200000;
  const double bound = 5 / std::sqrt(static_cast<double>(kCount));
  const auto moment = [&](int power) {
    return mean_of(kCount, [&](uint64_t i) { return std::pow(random.normal(i), power); });
  };
  EXPECT_NEAR(moment(1), 0, bound);
  EXPECT_NEAR(moment(2), 1, bound * std::sqrt(2.0));
  EXPECT_NEAR(moment(3), 0, bound * std::sqrt(15.0));
  EXPECT_NEAR(moment(4), 3, bound * std::sqrt(96.0));
  EXPECT_NEAR(mean_of(kCount, [&](uint64_t i) { return random.normal(i) * random.normal(i + 1); }),
              0, bound);
  EXPECT_NEAR(
      mean_of(kCount, [&](uint64_t i) { return std::abs(random.normal(i)) > 1.96 ? 1 : 0; }), 0.05,
      bound * 0.22);
}

// The distribution function of the normal numbers differs from the exact one by no more than chance
// allows (Kolmogorov and Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand times).
TEST(Philox, NormalDistribution) {
  const Philox random(5, RandomPurpose::kTest, "distribution");
  constexpr int kCount = 200000;
  std::vector<double> values;
  for (int i = 0; i < kCount; ++i) values.push_back(random.normal(static_cast<uint64_t>(i)));
  std::sort(values.begin(), values.end());
  double distance = 0;
  for (int i = 0; i < kCount; ++i) {
    const double exact = 0.5 * std::erfc(-values[static_cast<size_t>(i)] / std::sqrt(2.0));
    distance = std::max({distance, std::abs(exact - static_cast<double>(i) / kCount),
                         std::abs(exact - static_cast<double>(i + 1) / kCount)});
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(static_cast<double>(kCount)));
  // Beyond 4: 6.334e-5 of all, 12.7 expected. The bound is five standard deviations.
  const auto tail =
      std::count_if(values.begin(), values.end(), [](double value) { return std::abs(value) > 4; });
  EXPECT_NEAR(static_cast<double>(tail), 12.7, 5 * std::sqrt(12.7));
}

TEST(Philox, NormalIsTheFormulaOfBoxAndMuller) {
  const auto check = [](double u1, double u2) {
    const long double turn = 2 * std::numbers::pi_v<long double> * static_cast<long double>(u2);
    const auto log = static_cast<double>(std::log(static_cast<long double>(u1)));
    EXPECT_NEAR(kernels::philox_log(u1), log, std::abs(log) * 0x1p-52) << u1;
    EXPECT_NEAR(kernels::philox_cos_turns(u2), static_cast<double>(std::cos(turn)), 0x1p-52) << u2;
  };
  const Philox random(5, RandomPurpose::kTest, "formula");
  for (uint64_t i = 0; i < 200000; ++i) {
    // Half of the arguments are close to the ends of the range.
    const double u = random.uniform(2 * i);
    const double near = std::ldexp(u, -static_cast<int>(i % 53));
    check(std::max(i % 2 == 0 ? u : near, 0x1p-54), u);
    check(1 - near / 2, random.uniform(2 * i + 1));
  }
  for (const double quarter : {0.0, 0.25, 0.5, 0.75}) {
    for (const double u : {quarter, quarter + 0x1p-53, quarter + 0.125, quarter + 0.25 - 0x1p-53}) {
      check(1.0, u);
    }
  }
}

// The bits of the numbers, on every compiler, processor and backend. Runs are compared across them,
// so these numbers may never change.
TEST(Philox, NormalBitsAreStable) {
  const Philox random(1, RandomPurpose::kInit, "layers.0.weight");
  std::vector<double> values;
  for (uint64_t i = 0; i < 100000; ++i) values.push_back(random.normal(i * i * i));
  EXPECT_EQ(to_hex(sha256(values.data(), values.size() * sizeof(double))),
            "290420dbd8ebf633d5c14feda0eab55e06dc936a85695f75deefa76b5144028b");
}

}  // namespace
}  // namespace sbtrain
