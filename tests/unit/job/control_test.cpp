#include "job/control.h"

#include <gtest/gtest.h>

#include "unit/job/control_ranks.h"

namespace sbtrain {
namespace {

TEST(Control, EveryRankSeesAllTextsInOrder) {
  run_world(4, kPatient, [](Control& control) {
    const std::vector<int> everyone = all_ranks(4);
    for (int round = 0; round < 20; ++round) {
      const auto texts =
          control.exchange("all", everyone, fmt::format("{}.{}", round, control.rank()));
      ASSERT_EQ(texts.size(), 4u);
      for (int rank = 0; rank < 4; ++rank)
        EXPECT_EQ(texts[rank], fmt::format("{}.{}", round, rank));
    }
    control.finish();
  });
}

TEST(Control, TextsMayHoldAnyBytes) {
  run_world(2, kPatient, [](Control& control) {
    const std::string large(3 << 20, static_cast<char>('a' + control.rank()));
    EXPECT_EQ(control.exchange("large", std::vector<int>{0, 1}, large).back(),
              std::string(3 << 20, 'b'));
    const std::string zeros("\0\xff\n\0", 4);
    EXPECT_EQ(control.exchange("zeros", std::vector<int>{0, 1}, zeros).front(), zeros);
    EXPECT_THROW(control.exchange("huge", std::vector<int>{0, 1},
                                  std::string(Control::kLargestText + 1, 'x')),
                 Error);
    control.finish();
  });
}

TEST(Control, GroupsAndTopicsAreIndependent) {
  run_world(4, kPatient, [](Control& control) {
    const int rank = control.rank();
    const std::vector<int> group = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    std::thread beside([&] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(control.exchange("save", all_ranks(4), std::to_string(i))[3], std::to_string(i));
      }
    });
    for (int i = 0; i < 50; ++i) {
      const auto texts = control.exchange("group", group, fmt::format("{} {}", rank, i));
      EXPECT_EQ(texts, (std::vector<std::string>{fmt::format("{} {}", group[0], i),
                                                 fmt::format("{} {}", group[1], i)}));
    }
    beside.join();
    control.finish();
  });
}

TEST(Control, SixtyFourRanks) {
  run_world(64, kPatient, [](Control& control) {
    const auto texts =
        control.exchange("ranks", all_ranks(64), std::to_string(control.rank() * control.rank()));
    for (int rank = 0; rank < 64; ++rank) EXPECT_EQ(texts[rank], std::to_string(rank * rank));
    control.finish();
  });
}

TEST(Control, WorksOverIpv6) {
  try {
    control::listen_on("::1", 0);
  } catch (const Error&) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  run_ranks(launches(2, "::1"), {0, 1}, kPatient, [](Control& control) {
    EXPECT_EQ(control.exchange("a", std::vector<int>{0, 1}, "x").size(), 2u);
    control.finish();
  });
}

TEST(Control, RankZeroListensByItself) {
  std::vector<Launch> jobs = launches(2);
  ::close(std::exchange(jobs[0].listener, -1));
  run_ranks(jobs, {0, 1}, kPatient, [](Control& control) {
    control.check();
    control.finish();
  });
}

TEST(Control, APortInUseIsNamed) {
  std::vector<Launch> jobs = launches(2);
  const FileDescriptor holder(std::exchange(jobs[0].listener, -1));
  const auto control = make_control(jobs[0], kHasty);
  EXPECT_CONTAINS(wait_for_failure(*control).message, std::to_string(jobs[0].port));
  EXPECT_CONTAINS(control->failure()->message, "MASTER_PORT");
  EXPECT_TRUE(control->shows_failure());
}

}  // namespace
}  // namespace sbtrain
