// The threads that stand for ranks in other tests: sums in rank order, and misuse that ends.
#include "support/thread_world.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/tensors.h"

namespace sbtrain::test {
namespace {

Tensor view(std::vector<float>& x) {
  return Tensor(x.data(), DType::kF32, {static_cast<int64_t>(x.size())});
}

ExitCode code_of(const std::exception_ptr& error) {
  if (!error) return ExitCode::kDone;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.code();
  }
}

TEST(ThreadWorld, SixtyFourRanksGatherAndSum) {
  static constexpr int kRanks = 64;
  run_ranks(kRanks, [](Communicator& ranks) {
    CpuStream s;
    EXPECT_EQ(ranks.world(), kRanks);
    std::vector<float> shard(3, static_cast<float>(ranks.rank()));
    std::vector<float> full(3 * kRanks, -1);
    ranks.all_gather(s, view(full), view(shard));
    for (int i = 0; i < 3 * kRanks; ++i) {
      const int of_rank = i / 3;
      EXPECT_EQ(full[i], static_cast<float>(of_rank));
    }
    ranks.reduce_scatter(s, view(shard), view(full));
    EXPECT_EQ(shard, std::vector<float>(3, static_cast<float>(kRanks * ranks.rank())));
    std::vector<double> value = {1};
    ranks.sum(value);
    EXPECT_EQ(value, std::vector<double>{kRanks});
  });
}

// 1e8 + 1 + ... + 1 in f32 loses every 1 unless they are added to each other first.
TEST(ThreadWorld, SumsAreInRankOrder) {
  for (const int large : {0, 3}) {
    run_ranks(4, [&](Communicator& ranks) {
      CpuStream s;
      std::vector<float> x = {ranks.rank() == large ? 1e8f : 3.0f};
      ranks.all_reduce(s, view(x));
      EXPECT_EQ(x[0], large == 0 ? 1e8f + 3.0f + 3.0f + 3.0f : 9.0f + 1e8f);
    });
  }
}

TEST(ThreadWorld, GroupsAreApart) {
  run_ranks(6, [](Communicator& ranks) {
    const auto group = ranks.split([](int rank) { return rank % 2; });
    EXPECT_EQ(group->world(), 3);
    EXPECT_EQ(group->rank(), ranks.rank() / 2);
    std::vector<double> value = {static_cast<double>(ranks.rank())};
    group->sum(value);
    EXPECT_EQ(value[0], ranks.rank() % 2 == 0 ? 6 : 9);
  });
}

TEST(ThreadWorld, DifferentCallsThrowEverywhere) {
  const auto errors = run_ranks_and_catch(3, [](Communicator& ranks) {
    CpuStream s;
    std::vector<float> x(ranks.rank() == 1 ? 5 : 4);
    ranks.all_reduce(s, view(x));
  });
  for (const auto& error : errors) EXPECT_EQ(code_of(error), ExitCode::kInternal);
}

TEST(ThreadWorld, ARankThatLeavesFreesTheOthers) {
  const auto errors = run_ranks_and_catch(3, [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 2) return;
    ranks.barrier();
  });
  EXPECT_EQ(code_of(errors[0]), ExitCode::kCommunication);
  EXPECT_EQ(code_of(errors[1]), ExitCode::kCommunication);
  EXPECT_EQ(code_of(errors[2]), ExitCode::kDone);
}

TEST(ThreadWorld, TheCauseIsThrownAndNotItsConsequences) {
  const auto run = [] {
    run_ranks(3, [](Communicator& ranks) {
      if (ranks.rank() == 1) fail(ExitCode::kData, "no data");
      ranks.barrier();
    });
  };
  try {
    run();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::kData);
  }
}

}  // namespace
}  // namespace sbtrain::test
