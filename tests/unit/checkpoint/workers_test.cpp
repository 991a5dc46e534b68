#include "checkpoint/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace sbtrain {
namespace {

TEST(Workers, EveryPieceOfWorkIsDoneOnce) {
  for (const int64_t count : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> done(static_cast<size_t>(count));
    run_parallel(count, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
    for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
  }
}

TEST(Workers, AnErrorIsThrownAndStopsTheRest) {
  std::atomic<int64_t> done = 0;
  const auto work = [&](int64_t i) {
    if (i == 10) throw std::runtime_error("ten");
    ++done;
  };
  EXPECT_THROW(run_parallel(1'000'000'000, work), std::runtime_error);
  EXPECT_LT(done, 1'000'000'000);
}

}  // namespace
}  // namespace sbtrain
