// How a job ends whose ranks fail, vanish, or stand still.
#include <gtest/gtest.h>

#include "unit/job/control_ranks.h"

namespace sbtrain {
namespace {

// ---- Failures --------------------------------------------------------------------------------

TEST(Control, AFailureEndsTheJobWithItsCodeOnce) {
  for (const int failing : {0, 2}) {
    std::atomic<int> shown = 0;
    std::atomic<int> aborted = 0;
    run_world(4, kPatient, [&](Control& control) {
      std::atomic<int> called = 0;
      const auto handle = control.on_failure([&](const JobFailure& failure) {
        EXPECT_EQ(failure.code, ExitCode::kData);
        ++called;
      });
      if (control.rank() == failing) {
        control.report({.code = ExitCode::kData, .message = "a.h5: bad block"});
      } else {
        try {
          control.exchange("step", all_ranks(4), "");
          ADD_FAILURE() << "the exchange cannot succeed";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::kData);
          EXPECT_CONTAINS(error.what(), failing == 0 ? "a.h5: bad block" : "rank 2: a.h5: bad");
        }
        control.report({.code = ExitCode::kCommunication, .message = "a consequence"});
      }
      EXPECT_EQ(wait_for_failure(control).code, ExitCode::kData);
      const auto deadline = Clock::now() + std::chrono::seconds(10);
      while (!called && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(1));
      aborted += called;
      shown += control.shows_failure() ? 1 : 0;
    });
    EXPECT_EQ(shown, 1);
    EXPECT_EQ(aborted, 4);
  }
}

// mpirun and torchrun end all ranks as soon as one has ended, so rank 0 must have shown the
// message.
TEST(Control, RanksStayUntilRankZeroHasShownTheFailure) {
  const std::vector<Launch> jobs = launches(3);
  std::atomic<bool> shown = false;
  std::vector<std::thread> threads;
  for (const Launch& job : jobs) {
    threads.emplace_back([&] {
      auto control = make_control(job, kPatient);
      if (job.rank == 1) control->report({.code = ExitCode::kConfig, .message = "wrong"});
      wait_for_failure(*control);
      if (job.rank == 0) {
        std::this_thread::sleep_for(milliseconds(300));
        shown = true;
      }
      control.reset();
      EXPECT_TRUE(shown) << "rank " << job.rank;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Control, FinishMayBeCalledAgain) {
  run_world(2, kPatient, [](Control& control) {
    control.finish();
    control.finish();
  });
}

TEST(Control, CallbacksComeLateOrGoEarly) {
  run_world(2, kPatient, [](Control& control) {
    bool dropped = false;
    {
      const auto handle = control.on_failure([&](const JobFailure&) { dropped = true; });
    }
    control.exchange("dropped", std::vector<int>{0, 1}, "");
    if (control.rank() == 0) control.report({.code = ExitCode::kStorage, .message = "full"});
    wait_for_failure(control);
    std::atomic<bool> late = false;
    const auto handle = control.on_failure([&](const JobFailure&) { late = true; });
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    while (!late && Clock::now() < deadline) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(late);
    EXPECT_FALSE(dropped);
  });
}

TEST(Control, AKilledRankIsKnownAtOnce) {
  const std::vector<Launch> jobs = launches(3);
  RankProcess victim(jobs[2], kPatient, work_for_ever);
  run_ranks(jobs, {0, 1}, kPatient, [&](Control& control) {
    control.check();
    EXPECT_FALSE(control.failure());
    if (control.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(100));
      victim.signal(SIGKILL);
    }
    const JobFailure failure = wait_for_failure(control);
    EXPECT_EQ(failure.code, ExitCode::kCommunication);
    EXPECT_CONTAINS(failure.message, fmt::format("rank 2 (pid {}", victim.pid()));
    EXPECT_CONTAINS(failure.message, "'step ");
  });
}

TEST(Control, ARankThatLeavesWithoutAWordIsGone) {
  run_world(3, kPatient, [&](Control& control) {
    if (control.rank() == 1) return;
    EXPECT_CONTAINS(wait_for_failure(control).message, "rank 1");
  });
}

TEST(Control, ARankThatEndsEarlyIsNamed) {
  run_world(3, kPatient, [&](Control& control) {
    try {
      if (control.rank() != 1) control.exchange("step 7", all_ranks(3), "");
      control.finish();
      ADD_FAILURE() << "a job cannot end while ranks wait for others";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCommunication);
      EXPECT_CONTAINS(error.what(), "rank 1 has ended");
      EXPECT_CONTAINS(error.what(), "step 7");
    }
  });
}

// Patient until the ranks have met, and then for a second.
constexpr Deadlines kWatchful{.rendezvous = kPatient.rendezvous,
                              .progress = milliseconds(1000),
                              .heartbeat = kHasty.heartbeat};

TEST(Control, AStoppedRankIsNamed) {
  const std::vector<Launch> jobs = launches(3);
  RankProcess stopped(jobs[1], kWatchful, work_for_ever);
  run_ranks(jobs, {0, 2}, kWatchful, [&](Control& control) {
    control.check();
    if (control.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(100));
      stopped.stop();
    }
    std::atomic<bool> done = false;
    std::thread working([&] {
      while (!done) {
        control.progress("step");
        std::this_thread::sleep_for(milliseconds(5));
      }
    });
    const JobFailure failure = wait_for_failure(control);
    done = true;
    working.join();
    EXPECT_EQ(failure.code, ExitCode::kCommunication);
    EXPECT_CONTAINS(failure.message, "no answer from rank 1");
    EXPECT_CONTAINS(failure.message, fmt::format("pid {}", stopped.pid()));
  });
}

TEST(Control, AStoppedRankZeroIsNamedByTheOthers) {
  const std::vector<Launch> jobs = launches(3);
  RankProcess root(jobs[0], kWatchful, exchange_and_work);
  ::close(jobs[0].listener);
  std::atomic<int> arrived = 0;
  std::atomic<int> shown = 0;
  run_ranks(jobs, {1, 2}, kWatchful, [&](Control& control) {
    meet(control, arrived, 2);
    root.stop();
    EXPECT_CONTAINS(wait_for_failure(control).message, "rank 0 at 127.0.0.1");
    shown += control.shows_failure() ? 1 : 0;
  });
  EXPECT_EQ(shown, 1);
}

TEST(Control, AFailureThatRankZeroCannotHearIsShownByTheRankItself) {
  const std::vector<Launch> jobs = launches(3);
  RankProcess root(jobs[0], kPatient, exchange_and_work);
  ::close(jobs[0].listener);
  std::atomic<int> arrived = 0;
  run_ranks(jobs, {1, 2}, kPatient, [&](Control& control) {
    meet(control, arrived, 2);
    if (control.rank() == 1) {
      wait_for_failure(control);
      return;
    }
    root.stop();
    std::thread killer([&] {
      std::this_thread::sleep_for(milliseconds(100));
      root.signal(SIGKILL);
    });
    control.report({.code = ExitCode::kOutOfMemory, .message = "too large"});
    killer.join();
    EXPECT_TRUE(control.shows_failure());
    EXPECT_EQ(control.failure()->code, ExitCode::kOutOfMemory);
  });
}

// ---- Progress --------------------------------------------------------------------------------

TEST(Control, NoProgressEndsTheJobAndSaysWhoDidWhat) {
  run_world(3, kHasty, [](Control& control) {
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    if (control.rank() == 1) {
      control.progress("step 119");
      control.waits_for("the disk");
    }
    std::thread waiting;
    if (control.rank() == 2) {
      waiting = std::thread([&] {
        EXPECT_THROW(control.exchange("save", std::vector<int>{1, 2}, ""), Error);
      });
    }
    while (!control.failure() && Clock::now() < deadline) {
      if (control.rank() != 1) control.progress("step 120");
      std::this_thread::sleep_for(milliseconds(2));
    }
    const std::string message = wait_for_failure(control).message;
    EXPECT_CONTAINS(message, "no progress of rank 1 for 0.5 s (train.timeout)");
    EXPECT_CONTAINS(message, "'step 119', waiting for the disk");
    EXPECT_CONTAINS(message, "ranks 0, 2");
    EXPECT_CONTAINS(message, "'save' waits for rank 1");
    if (waiting.joinable()) waiting.join();
  });
}

TEST(Control, AnAllowanceHoldsForAllRanks) {
  run_world(3, kHasty, [](Control& control) {
    control.exchange("begin", all_ranks(3), "");
    if (control.rank() == 1) {
      control.progress("compiling", milliseconds(20000));
      std::this_thread::sleep_for(milliseconds(1500));
    }
    control.exchange("end", all_ranks(3), "");
    control.finish();
  });
}

TEST(Control, AnAllowanceEnds) {
  run_world(2, kHasty, [](Control& control) {
    control.progress("compiling", milliseconds(800));
    const auto begin = Clock::now();
    wait_for_failure(control);
    EXPECT_GT(Clock::now() - begin, milliseconds(700));
    EXPECT_CONTAINS(control.failure()->message, "'compiling'");
  });
}

TEST(Control, ClockStandsStillWhileNobodyTicks) {
  control::WatchedClock clock(milliseconds(10));
  clock.tick();
  const control::Time before = clock.now();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_LE(clock.now() - before, milliseconds(10));
  clock.tick();
  EXPECT_LE(clock.now() - before, milliseconds(30));
}

TEST(Control, AJobThatIsStoppedAsAWholeGoesOn) {
  const std::vector<Launch> jobs = launches(2);
  const auto work = [](Control& control) {
    for (int i = 0; i < 400; ++i) {
      control.progress(fmt::format("step {}", i));
      control.exchange("step", std::vector<int>{0, 1}, "");
      std::this_thread::sleep_for(milliseconds(2));
    }
    control.finish();
  };
  Deadlines deadlines = kHasty;
  deadlines.rendezvous = kPatient.rendezvous;
  RankProcess root(jobs[0], deadlines, work);
  RankProcess other(jobs[1], deadlines, work);
  ::close(jobs[0].listener);
  std::this_thread::sleep_for(milliseconds(300));
  root.stop();
  other.stop();
  std::this_thread::sleep_for(milliseconds(1500));
  other.signal(SIGCONT);
  root.signal(SIGCONT);
  EXPECT_EQ(root.wait(), 0);
  EXPECT_EQ(other.wait(), 0);
}

}  // namespace
}  // namespace sbtrain
