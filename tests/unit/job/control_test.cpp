#include "job/control.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "core/log.h"
#include "job/control_socket.h"
#include "job/launch.h"
#include "job/secret.h"
#include "job/tcp_control.h"
#include "support/process.h"

namespace sbtrain {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Short enough for tests, long enough for a machine that is busy with others.
constexpr Deadlines kPatient{.rendezvous = milliseconds(20000),
                             .progress = milliseconds(20000),
                             .heartbeat = milliseconds(20)};
constexpr Deadlines kHasty{
    .rendezvous = milliseconds(500), .progress = milliseconds(500), .heartbeat = milliseconds(20)};

// The launches of a job on this machine, whose rank 0 listens already.
std::vector<Launch> launches(int world, const std::string& address = "127.0.0.1") {
  FileDescriptor listener = control::listen_on(address, 0);
  std::vector<Launch> result;
  for (int rank = 0; rank < world; ++rank) {
    result.push_back({.launcher = "test",
                      .rank = rank,
                      .world = world,
                      .local_rank = rank,
                      .local_world = world,
                      .address = address,
                      .port = control::port_of(listener.get()),
                      .token = "job 1"});
  }
  result[0].listener = listener.release();
  return result;
}

std::vector<int> all_ranks(int world) {
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Runs `work` with the Control of every rank in `ranks`, each in a thread of its own.
void run_ranks(const std::vector<Launch>& jobs, const std::vector<int>& ranks,
               const Deadlines& deadlines, const std::function<void(Control&)>& work) {
  std::vector<std::thread> threads;
  for (const int rank : ranks) {
    threads.emplace_back([&, rank] {
      try {
        work(*make_control(jobs.at(rank), deadlines));
      } catch (const Error& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_world(int world, const Deadlines& deadlines, const std::function<void(Control&)>& work) {
  run_ranks(launches(world), all_ranks(world), deadlines, work);
}

// Waits until the job has failed.
JobFailure wait_for_failure(const Control& control) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!control.failure() && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return control.failure().value_or(JobFailure{.code = ExitCode::kDone, .message = "no failure"});
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_CONTAINS(text, part) EXPECT_TRUE(contains(text, part)) << text

// A process that is one rank of a job. Must start before this process has threads.
class RankProcess {
 public:
  RankProcess(const Launch& launch, const Deadlines& deadlines,
              const std::function<void(Control&)>& work) {
    pid_ = fork();
    if (pid_ != 0) return;
    int code = 0;
    try {
      const std::unique_ptr<Control> control = make_control(launch, deadlines);
      work(*control);
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    }
    _exit(code);
  }
  ~RankProcess() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  void signal(int number) const { kill(pid_, number); }
  // Returns once all its threads have stopped: until the one that has been given the signal runs,
  // the others go on.
  void stop() const {
    signal(SIGSTOP);
    siginfo_t state;
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &state, WSTOPPED | WNOWAIT), 0);
  }
  pid_t pid() const { return pid_; }
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_ = -1;
};

[[noreturn]] void work_for_ever(Control& control) {
  for (int step = 1;; ++step) {
    control.check();
    control.progress(fmt::format("step {}", step));
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// Returns when the ranks that are threads of this test have passed an exchange with all others.
void meet(Control& control, std::atomic<int>& arrived, int threads) {
  control.exchange("all are there", all_ranks(control.world()), "");
  ++arrived;
  while (arrived < threads) std::this_thread::sleep_for(milliseconds(1));
}

[[noreturn]] void exchange_and_work(Control& control) {
  control.exchange("all are there", all_ranks(control.world()), "");
  work_for_ever(control);
}

// ---- Exchanges -------------------------------------------------------------------------------

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

// ---- Rendezvous ------------------------------------------------------------------------------

TEST(Control, NamesTheRanksThatDoNotCome) {
  run_ranks(launches(6), {0, 1, 4}, kHasty, [](Control& control) {
    const JobFailure failure = wait_for_failure(control);
    EXPECT_EQ(failure.code, ExitCode::kCommunication);
    EXPECT_CONTAINS(failure.message, "ranks 2, 3, 5 of 6 did not come within 0.5 s");
    EXPECT_EQ(control.shows_failure(), control.rank() == 0);
    EXPECT_THROW(control.check(), Error);
    EXPECT_THROW(control.exchange("a", all_ranks(6), ""), Error);
  });
}

TEST(Control, SaysThatRankZeroCannotBeReached) {
  std::vector<Launch> jobs = launches(2);
  ::close(jobs[0].listener);
  const auto control = make_control(jobs[1], kHasty);
  const JobFailure failure = wait_for_failure(*control);
  EXPECT_EQ(failure.code, ExitCode::kCommunication);
  EXPECT_CONTAINS(failure.message, fmt::format("127.0.0.1:{}", jobs[0].port));
  EXPECT_CONTAINS(failure.message, "refused");
  EXPECT_TRUE(control->shows_failure());
}

// A rank that is asked to stop while others are awaited does not wait for them.
std::atomic<bool> asked_to_stop = false;
constexpr Deadlines kStoppable{.rendezvous = milliseconds(20000),
                               .progress = milliseconds(20000),
                               .heartbeat = milliseconds(20),
                               .stopped = [] { return asked_to_stop.load(); }};

class StoppedEarly : public testing::TestWithParam<std::vector<int>> {};

TEST_P(StoppedEarly, EndsTheJobAsPreempted) {
  asked_to_stop = false;
  const std::vector<int>& ranks = GetParam();
  std::vector<Launch> jobs = launches(3);
  if (ranks.front() != 0) ::close(jobs[0].listener);
  std::thread signal([] {
    std::this_thread::sleep_for(milliseconds(300));
    asked_to_stop = true;
  });
  const auto begin = Clock::now();
  run_ranks(jobs, ranks, kStoppable, [&](Control& control) {
    const JobFailure failure = wait_for_failure(control);
    EXPECT_EQ(failure.code, ExitCode::kPreempted);
    EXPECT_CONTAINS(failure.message, "asked to stop");
    EXPECT_EQ(control.shows_failure(), control.rank() == ranks.front());
  });
  signal.join();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

// With rank 0 or without.
INSTANTIATE_TEST_SUITE_P(Control, StoppedEarly,
                         testing::Values(std::vector<int>{0}, std::vector<int>{0, 2},
                                         std::vector<int>{1, 2}));

// Rank 0 learns of it from the one that was asked.
TEST(Control, OneRankThatIsAskedToStopEarlyIsEnough) {
  const std::vector<Launch> jobs = launches(3);
  std::thread root([&] {
    run_ranks(jobs, {0}, kPatient, [](Control& control) {
      const JobFailure failure = wait_for_failure(control);
      EXPECT_EQ(failure.code, ExitCode::kPreempted);
      EXPECT_CONTAINS(failure.message, "rank 1: asked to stop");
    });
  });
  Deadlines stopped = kPatient;
  stopped.stopped = [] { return true; };
  run_ranks(jobs, {1}, stopped, [](Control& control) {
    EXPECT_EQ(wait_for_failure(control).code, ExitCode::kPreempted);
    EXPECT_FALSE(control.shows_failure());
  });
  root.join();
}

TEST(Control, AForeignJobCannotJoin) {
  std::vector<Launch> jobs = launches(2);
  Launch stranger = jobs[1];
  stranger.token = "job 2";
  std::atomic<bool> refused = false;
  std::thread intruder([&] {
    const auto control = make_control(stranger, kHasty);
    EXPECT_CONTAINS(wait_for_failure(*control).message, "another job");
    refused = true;
  });
  std::thread root([&] {
    const auto control = make_control(jobs[0], kPatient);
    control->check();
    EXPECT_TRUE(refused);  // the job was waiting for its own rank 1
    EXPECT_EQ(control->exchange("who", std::vector<int>{0, 1}, "a")[1], "b");
    control->finish();
  });
  intruder.join();
  const auto control = make_control(jobs[1], kPatient);
  control->exchange("who", std::vector<int>{0, 1}, "b");
  control->finish();
  root.join();
}

// The name of a job can be guessed, its secret cannot.
TEST(Control, WhoKnowsTheNameAloneCannotJoin) {
  std::vector<Launch> jobs = launches(2);
  jobs[0].secret = "what mpirun has told its ranks";
  Launch stranger = jobs[1];
  for (const char* secret : {"", "a guess", "what mpirun has told its rank"}) {
    stranger.secret = secret;
    std::thread root([&] {
      Launch own = jobs[0];
      own.listener = ::dup(jobs[0].listener);
      const auto control = make_control(own, kHasty);
      EXPECT_CONTAINS(wait_for_failure(*control).message, "rank 1 of 2 did not come");
    });
    const auto control = make_control(stranger, kHasty);
    EXPECT_CONTAINS(wait_for_failure(*control).message, "another job");
    root.join();
  }
  ::close(jobs[0].listener);
}

// And a program that takes the port of rank 0 learns nothing and cannot speak for it.
TEST(Control, WhoTakesThePortCannotSpeakForRankZero) {
  std::vector<Launch> jobs = launches(2);
  jobs[1].secret = "a secret";
  const FileDescriptor listener(jobs[0].listener);
  std::string heard;
  std::thread impostor([&] {
    pollfd ready{listener.get(), POLLIN, 0};
    ::poll(&ready, 1, 10000);
    control::Connection guest(control::accept_from(listener.get()), 1 << 20);
    guest.send(control::Challenge{.nonce = "1"});
    guest.send(control::Welcome{.proof = "2"});
    guest.send(control::Failure{.code = 0, .message = "all is well"});
    guest.flush();
    ::poll(nullptr, 0, 300);
    std::vector<control::Message> messages;
    guest.receive(messages);
    for (const control::Message& message : messages) heard += control::encode(message);
  });
  const auto control = make_control(jobs[1], kHasty);
  const JobFailure failure = wait_for_failure(*control);
  EXPECT_EQ(failure.code, ExitCode::kCommunication);
  EXPECT_CONTAINS(failure.message, "could not reach rank 0");
  impostor.join();
  EXPECT_NE(heard, "");
  EXPECT_FALSE(contains(heard, "a secret"));
}

class Lines : public LogSink {
 public:
  void write(const LogLine& line) override { text += line.text; }
  std::string text;
};

TEST(Control, WhatAStrangerWritesIsLoggedClean) {
  const auto lines = std::make_shared<Lines>();
  set_log_sink(lines);
  std::vector<Launch> jobs = launches(2);
  std::thread root([&] {
    const auto control = make_control(jobs[0], kHasty);
    wait_for_failure(*control);
  });
  std::string problem;
  control::Connection guest(
      control::connect_to("127.0.0.1", jobs[0].port, kHasty.rendezvous, problem), 1 << 20);
  guest.send(control::Hello{.rank = 1, .world = 2, .host = "\x1b[31mred\r\n[info] all is well"});
  guest.send(control::Proof{.proof = "a guess"});
  guest.flush();
  root.join();
  set_log_sink(nullptr);
  EXPECT_CONTAINS(lines->text, "?[31mred??[info] all is well, rank 1");
  EXPECT_EQ(lines->text.find('\x1b'), std::string::npos);
}

// Rank 0 makes the secret; the others may find that of an earlier start first.
TEST(Control, ASecretMayLieInAFile) {
  const test::TemporaryFolder folder;
  const std::filesystem::path file = folder / "secret";
  control::write_secret(file, control::random_secret());
  std::vector<Launch> jobs = launches(3);
  for (Launch& job : jobs) job.secret_file = file;
  std::thread others([&] {
    run_ranks(jobs, {1, 2}, kPatient, [](Control& control) {
      control.check();
      control.finish();
    });
  });
  std::this_thread::sleep_for(milliseconds(100));
  run_ranks(jobs, {0}, kPatient, [&](Control& control) {
    control.check();
    EXPECT_FALSE(std::filesystem::exists(file));  // all have read it
    control.finish();
  });
  others.join();
}

TEST(Control, ASecondProcessOfARankIsRefused) {
  const std::vector<Launch> jobs = launches(3);
  const auto work = [](Control& control) {
    control.check();
    control.finish();
  };
  std::thread first([&] { run_ranks(jobs, {0, 1}, kPatient, work); });
  // The process that comes second is refused while the job still waits for rank 2.
  std::atomic<int> refused = 0;
  const auto twin = [&] {
    const auto control = make_control(jobs[1], kHasty);
    if (contains(wait_for_failure(*control).message, "rank 1 is there already: pid")) ++refused;
  };
  std::this_thread::sleep_for(milliseconds(300));
  twin();
  EXPECT_EQ(refused, 1);
  run_ranks(jobs, {2}, kPatient, work);
  first.join();
}

// Connections that send garbage, too much, or nothing, and wrong versions, change nothing.
TEST(Control, HostileConnectionsDoNotDisturb) {
  const std::vector<Launch> jobs = launches(2);
  std::string problem;
  const auto connect = [&] {
    return control::connect_to("127.0.0.1", jobs[0].port, milliseconds(1000), problem);
  };
  const auto send = [](const FileDescriptor& socket, const std::string& bytes) {
    return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  };
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(connect());
  std::vector<FileDescriptor> loud;
  const std::string valid =
      control::encode(control::Hello{.nonce = "job 1", .rank = 1, .world = 2});
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(64, '\xff'), std::string(64, '\0'),
        valid.substr(0, valid.size() / 2), control::encode(control::Start{}),
        control::encode(control::Failure{.code = 4, .message = "hostile"}),
        control::encode(control::Hello{.nonce = std::string(5000, 'x'), .rank = 1, .world = 2}),
        control::encode(control::Hello{.version = 99, .nonce = "job 1", .rank = 1, .world = 2}),
        control::encode(control::Hello{.nonce = "job 1", .rank = 0, .world = 2}),
        control::encode(control::Hello{.nonce = "job 1", .rank = 2, .world = 2}),
        control::encode(control::Hello{.nonce = "job 1", .rank = 1, .world = 3})}) {
    loud.push_back(connect());
    EXPECT_EQ(send(loud.back(), bytes), static_cast<ssize_t>(bytes.size()));
  }
  run_ranks(jobs, {0, 1}, kPatient, [&](Control& control) {
    control.check();
    EXPECT_EQ(control.exchange("a", std::vector<int>{0, 1}, "x").size(), 2u);
    control.finish();
  });
}

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

TEST(Control, AStoppedRankIsNamed) {
  Deadlines deadlines = kHasty;
  deadlines.rendezvous = kPatient.rendezvous;
  deadlines.progress = milliseconds(1000);
  const std::vector<Launch> jobs = launches(3);
  RankProcess stopped(jobs[1], deadlines, work_for_ever);
  run_ranks(jobs, {0, 2}, deadlines, [&](Control& control) {
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
  Deadlines deadlines = kHasty;
  deadlines.rendezvous = kPatient.rendezvous;
  deadlines.progress = milliseconds(1000);
  const std::vector<Launch> jobs = launches(3);
  RankProcess root(jobs[0], deadlines, exchange_and_work);
  ::close(jobs[0].listener);
  std::atomic<int> arrived = 0;
  std::atomic<int> shown = 0;
  run_ranks(jobs, {1, 2}, deadlines, [&](Control& control) {
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

// ---- Messages --------------------------------------------------------------------------------

TEST(ControlMessage, EveryTruncationIsRefused) {
  const std::string frame = control::encode(
      control::Texts{.topic = "a topic", .members = {0, 3, 700}, .texts = {"x", "", "zz"}});
  const std::string body = frame.substr(4);
  EXPECT_EQ(std::get<control::Texts>(control::decode(body)).members[2], 700u);
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_THROW(control::decode(body.substr(0, size)), Error) << size;
  }
  EXPECT_THROW(control::decode(body + "x"), Error);
  EXPECT_THROW(control::decode("\x7f"), Error);
}

TEST(ControlMessage, DescribesRanks) {
  EXPECT_EQ(control::describe_ranks({0, 1, 3, 4, 5, 9}), "0, 1, 3-5, 9");
}

}  // namespace
}  // namespace sbtrain
