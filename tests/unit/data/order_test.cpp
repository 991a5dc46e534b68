#include <numeric>

#include "data/mixture.h"
#include "data/sample_order.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

TEST(Permutation, IsABijection) {
  for (const int64_t n : {1, 2, 3, 5, 64, 100, 255, 256, 257, 1000, 65537}) {
    const Permutation permutation(11, "source", 3, n);
    std::vector<bool> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t to = permutation(i);
      ASSERT_TRUE(to >= 0 && to < n);
      ASSERT_FALSE(seen[static_cast<size_t>(to)]) << "n " << n << ", i " << i;
      seen[static_cast<size_t>(to)] = true;
    }
  }
}

TEST(Permutation, StaysInsideHugeRanges) {
  const int64_t n = (int64_t{1} << 40) + 12345;
  const Permutation permutation(11, "source", 3, n);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 2000; ++i) seen.insert(permutation(n - 1 - i));
  EXPECT_EQ(seen.size(), 2000u);
  EXPECT_TRUE(*seen.begin() >= 0 && *seen.rbegin() < n);
}

TEST(Permutation, DependsOnSeedSourceAndEpoch) {
  const int64_t n = 1000;
  const auto images = [&](const Permutation& p) {
    std::vector<int64_t> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(p(i));
    return v;
  };
  const auto base = images(Permutation(1, "a", 0, n));
  EXPECT_EQ(base, images(Permutation(1, "a", 0, n)));
  for (const auto& other : {images(Permutation(2, "a", 0, n)), images(Permutation(1, "b", 0, n)),
                            images(Permutation(1, "a", 1, n))}) {
    int same = 0;
    for (size_t i = 0; i < base.size(); ++i) same += base[i] == other[i] ? 1 : 0;
    EXPECT_LT(same, 10);  // unrelated permutations agree in 1 on average
  }
}

// Each element should come first, second, ... about equally often over the epochs.
TEST(Permutation, SpreadsEvenly) {
  const int64_t n = 6;
  const int epochs = 6000;
  std::vector<int> counts(static_cast<size_t>(n * n));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const Permutation permutation(5, "s", static_cast<uint64_t>(epoch), n);
    for (int64_t i = 0; i < n; ++i) ++counts[static_cast<size_t>(i * n + permutation(i))];
  }
  for (const int count : counts) EXPECT_NEAR(count, 1000, 150);  // 5 standard deviations
}

TEST(Mixture, KeepsShares) {
  const std::vector<double> weights = {5, 3, 1.5, 0.5};
  Mixture mixture(weights);
  for (int row = 0; row < 10000; ++row) {
    const int source = mixture.pick(256);
    mixture.add(source, source == 2 ? 200 : 256);  // rows may hold padding
    if (row < 100) continue;
    const auto total = static_cast<double>(
        std::accumulate(mixture.taken().begin(), mixture.taken().end(), int64_t{0}));
    for (size_t i = 0; i < weights.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(mixture.taken()[i]), total * weights[i] / 10, 2 * 256);
    }
  }
}

TEST(Mixture, GoesOnFromCounts) {
  const std::vector<double> weights = {0.7, 0.2, 0.1};
  Mixture whole(weights);
  std::vector<int> picks;
  for (int row = 0; row < 500; ++row) {
    Mixture resumed(weights, whole.taken());
    const int source = whole.pick(64);
    ASSERT_EQ(resumed.pick(64), source);
    whole.add(source, 64);
  }
}

TEST(Mixture, RefusesBadWeights) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::vector<double>& weights :
       {std::vector<double>{}, {1, 0}, {1, -1}, {nan}, {1, 1 / 0.0}}) {
    EXPECT_EQ(thrown_by([&] { Mixture mixture(weights); }).code, ExitCode::kConfig);
  }
}

}  // namespace
}  // namespace sbtrain::test
