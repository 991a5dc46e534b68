#include "core/host_threads.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/error.h"

namespace sbtrain::test {
namespace {

TEST(CallOrLeave, WaitsForTheCallAndPassesOnWhatItThrows) {
  int checks = 0;
  bool called = false;
  call_or_leave(
      [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        called = true;
      },
      [&] { ++checks; });
  EXPECT_TRUE(called);
  EXPECT_GT(checks, 0);
  EXPECT_THROW(call_or_leave([] { fail(ExitCode::kData, "no"); }, [] {}), Error);
}

// Destructors of static objects would pull away under the thread what it works with.
TEST(CallOrLeave, AProcessThatHasLeftACallBehindEndsWithItsCodeAndWithoutDestructors) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        struct Library {
          ~Library() { ::_exit(139); }
        };
        [[maybe_unused]] static const Library library;
        std::printf("what was written");
        try {
          call_or_leave([] { std::this_thread::sleep_for(std::chrono::hours(1)); },
                        [] { fail(ExitCode::kCommunication, "a rank is gone"); });
        } catch (const Error& error) {
          std::exit(static_cast<int>(error.code()));
        }
      },
      testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace sbtrain::test
