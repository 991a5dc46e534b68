#include "train/signals.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace sbtrain {
namespace {

TEST(StopSignals, NothingIsRequestedAtFirst) {
  StopSignals signals;
  EXPECT_FALSE(signals.stop_requested());
  EXPECT_FALSE(signals.save_requested());
  EXPECT_EQ(signals.signal(), 0);
}

TEST(StopSignals, EachStopSignalAsksForAStop) {
  for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
    StopSignals signals;
    raise(number);
    EXPECT_TRUE(signals.stop_requested());
    EXPECT_EQ(signals.signal(), number);
    EXPECT_FALSE(signals.save_requested());
  }
}

TEST(StopSignals, RepeatedWarningsChangeNothing) {
  StopSignals signals;
  raise(SIGUSR1);
  for (int i = 0; i < 3; ++i) raise(SIGTERM);
  EXPECT_EQ(signals.signal(), SIGUSR1);
}

TEST(StopSignals, ASaveRequestIsTakenOnceAndDoesNotStop) {
  StopSignals signals;
  raise(SIGUSR2);
  EXPECT_FALSE(signals.stop_requested());
  EXPECT_TRUE(signals.save_requested());
  EXPECT_FALSE(signals.save_requested());
  raise(SIGUSR2);
  EXPECT_TRUE(signals.save_requested());
}

TEST(StopSignals, FlagsShowWhatIsRequested) {
  const double* flags = nullptr;
  {
    StopSignals signals;
    raise(SIGUSR2);  // before anybody has asked for the flags
    flags = StopSignals::flags(Backend::kCpu);
    EXPECT_EQ(flags[0], 0);
    EXPECT_EQ(flags[1], 1);
    EXPECT_TRUE(signals.save_requested());
    EXPECT_EQ(flags[1], 0);
    raise(SIGTERM);
    EXPECT_EQ(flags[0], 1);
    EXPECT_EQ(flags[1], 0);
    raise(SIGUSR2);
    EXPECT_EQ(flags[1], 1);
  }
  StopSignals signals;
  EXPECT_EQ(flags[0], 0);
  EXPECT_EQ(flags[1], 0);
}

TEST(StopSignals, TheSecondInterruptEndsTheProcess) {
  const auto interrupt_twice = [] {
    StopSignals signals;
    raise(SIGINT);
    if (!signals.stop_requested()) _exit(1);
    raise(SIGINT);
    _exit(2);
  };
  EXPECT_EXIT(interrupt_twice(), testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, AnInterruptAfterAWarningIsTheFirstOne) {
  StopSignals signals;
  raise(SIGTERM);
  raise(SIGINT);
  EXPECT_EQ(signals.signal(), SIGTERM);
}

TEST(StopSignals, RestoresEarlierHandlers) {
  static volatile sig_atomic_t seen = 0;
  const auto before = std::signal(SIGTERM, [](int) { seen = seen + 1; });
  {
    StopSignals signals;
    raise(SIGTERM);
    EXPECT_EQ(seen, 0);
  }
  raise(SIGTERM);
  EXPECT_EQ(seen, 1);
  std::signal(SIGTERM, before);
}

// Signals that arrive while the program starts, before anything handles them.
TEST(StopSignals, HeldSignalsAreTaken) {
  hold_stop_signals();
  raise(SIGTERM);
  raise(SIGUSR2);
  StopSignals signals;
  EXPECT_EQ(signals.signal(), SIGTERM);
  EXPECT_TRUE(signals.save_requested());
}

TEST(StopSignals, OneAtATime) {
  {
    StopSignals signals;
    EXPECT_THROW(StopSignals(), Error);
    raise(SIGTERM);
    EXPECT_TRUE(signals.stop_requested());  // the failed second one left the first intact
  }
  StopSignals next;
  EXPECT_FALSE(next.stop_requested());
}

}  // namespace
}  // namespace sbtrain
