// How the ranks of a job find each other, and who else tries.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include "core/log.h"
#include "job/secret.h"
#include "support/process.h"
#include "unit/job/control_ranks.h"

namespace sbtrain {
namespace {

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

}  // namespace
}  // namespace sbtrain
