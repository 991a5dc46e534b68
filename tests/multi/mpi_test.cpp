// Ranks on the CPU, started by mpirun: the checks of communicators, and ranks that fail.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "multi/digest.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

struct Outcome {
  int code;
  std::string output;
};

// mpirun ends all ranks when one fails, unless `survivors_stay`.
Outcome mpirun(int world, std::vector<std::string> command, bool survivors_stay = false) {
  const TemporaryFolder folder;
  std::vector<std::string> line = {SBTRAIN_MPIRUN, "--oversubscribe", "--allow-run-as-root", "-n",
                                   std::to_string(world)};
  if (survivors_stay) line.emplace_back("--enable-recovery");
  line.insert(line.end(), command.begin(), command.end());
  Process process(line, folder / "log", rank_environment());
  const int code = process.wait();
  return {code, process.output()};
}

class MpiRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, MpiRanks, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(MpiRanks, PassTheChecksOfCommunicators) {
  const Outcome outcome = mpirun(GetParam(), {SBTRAIN_RANK, "checks", "cpu"});
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

// What an optimizer makes of the same weights and gradients is the same for every number of ranks.
TEST(MpiUpdates, HaveTheSameBitsInEveryWorld) {
  for (const char* optimizer : {"adamw", "muon"}) {
    std::set<std::string> digests;
    for (const auto& [world, sharding] : {std::pair(1, "full"), {2, "none"}, {4, "full"}}) {
      const TemporaryFolder folder;
      const Outcome outcome = mpirun(world, {SBTRAIN_RANK, "update", "cpu", optimizer, sharding,
                                             "multiprocessors", folder.path()});
      ASSERT_EQ(outcome.code, 0) << outcome.output;
      digests.insert(digest_in(outcome.output));
    }
    EXPECT_EQ(digests.size(), 1U) << optimizer;
  }
}

// Rank 1 of three. The others must end, and know why: nobody may wait for ever.
void expect_end(const std::string& fault, bool survivors_stay, int code,
                const std::string& message) {
  const Outcome outcome = mpirun(3, {SBTRAIN_RANK, "fault", "cpu", fault}, survivors_stay);
  EXPECT_EQ(outcome.code, survivors_stay ? 0 : code) << outcome.output;
  for (const int rank : {0, 2}) {
    const std::string end = fmt::format("rank {} ends with {}: {}", rank, code, message);
    EXPECT_NE(outcome.output.find(end), std::string::npos) << end << "\n" << outcome.output;
  }
}

// mpirun, which would end the others at once, is told to leave them alone.
TEST(MpiFaults, AKilledRankEndsTheJob) {
  expect_end("kill", true, 7, "rank 1");
}
TEST(MpiFaults, ARankThatIsKilledInAnExchangeEndsTheJob) {
  expect_end("exchange", true, 7, "rank 1");
}
// As on GPUs whose copy engines wait for one that is gone.
TEST(MpiFaults, RanksThatNothingFreesEndAllTheSame) {
  const Outcome outcome = mpirun(3, {SBTRAIN_RANK, "fault", "cpu", "stuck"}, true);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_NE(outcome.output.find("error: rank 1 (pid "), std::string::npos) << outcome.output;
}
TEST(MpiFaults, ARankThatLeavesEndsTheJob) {
  expect_end("leave", true, 7, "rank 1");
}
// The first rank to end makes mpirun end the others, so the last of them may not get to say why.
TEST(MpiFaults, AnErrorOfOneRankIsEveryRanks) {
  const Outcome outcome = mpirun(3, {SBTRAIN_RANK, "fault", "cpu", "throw"});
  EXPECT_EQ(outcome.code, 4) << outcome.output;
  EXPECT_NE(outcome.output.find("shard 3 is damaged"), std::string::npos) << outcome.output;
}
TEST(MpiFaults, AStoppedRankEndsTheJobAtItsDeadline) {
  const Outcome outcome = mpirun(3, {SBTRAIN_RANK, "fault", "cpu", "stop"});
  EXPECT_EQ(outcome.code, 7) << outcome.output;
  EXPECT_NE(outcome.output.find("no answer from rank 1"), std::string::npos) << outcome.output;
}
TEST(MpiFaults, ARankThatHangsEndsTheJobAtItsDeadline) {
  const Outcome outcome = mpirun(3, {SBTRAIN_RANK, "fault", "cpu", "hang"});
  EXPECT_EQ(outcome.code, 7) << outcome.output;
  EXPECT_NE(outcome.output.find("no progress"), std::string::npos) << outcome.output;
}

}  // namespace
}  // namespace sbtrain::test
