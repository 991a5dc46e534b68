#include "train/host_share.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr size_t kGiB = size_t{1} << 30;

// Rank 0 of a job whose other ranks have said what is given.
class Answers : public Control {
 public:
  explicit Answers(std::vector<std::string> others) : others_(std::move(others)) {}
  int rank() const override { return 0; }
  int world() const override { return static_cast<int>(others_.size()) + 1; }
  std::vector<std::string> exchange(std::string_view /*topic*/, std::span<const int> /*members*/,
                                    std::string value) override {
    std::vector<std::string> all = others_;
    all.insert(all.begin(), std::move(value));
    return all;
  }
  void progress(std::string_view /*what*/, std::chrono::milliseconds /*allowance*/) override {}
  void waits_for(std::string_view /*what*/) override {}
  void report(const JobFailure& /*failure*/) override {}
  FailureHandle on_failure(std::function<void(const JobFailure&)> /*abort*/) override {
    return nullptr;
  }
  void check() const override {}
  std::optional<JobFailure> failure() const override { return std::nullopt; }
  bool shows_failure() const override { return true; }
  void finish() override {}

 private:
  std::vector<std::string> others_;
};

std::string text(int node, size_t bytes, size_t free) {
  return fmt::format("{} {} {}", node, bytes, free);
}

TEST(HostShare, SumsTheRanksOfANode) {
  // Two ranks of 3 GiB here, two elsewhere; the least of what this node's ranks have seen is free.
  Answers job({text(0, 3 * kGiB, 7 * kGiB), text(1, 9 * kGiB, kGiB), text(1, 0, 0)});
  EXPECT_NO_THROW(require_shared_memory(job, {0, 3 * kGiB, 6 * kGiB}, "the run"));
  try {
    require_shared_memory(job, {0, 3 * kGiB, 5 * kGiB}, "the run");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("needs 6.00 GiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("2 ranks"), std::string::npos) << error.what();
  }
}

TEST(HostShare, ARankAloneOnItsNodeHasItsOwnCheck) {
  Answers job({text(1, kGiB, kGiB)});
  EXPECT_NO_THROW(require_shared_memory(job, {0, 3 * kGiB, kGiB}, "the run"));
}

TEST(HostShare, UnknownIsNoLimit) {
  Answers job({text(0, kGiB, SIZE_MAX)});
  EXPECT_NO_THROW(require_shared_memory(job, {0, 3 * kGiB, SIZE_MAX}, "the run"));
}

}  // namespace
}  // namespace sbtrain
