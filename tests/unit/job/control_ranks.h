// The ranks of a job on this machine, as threads and as processes, for tests of its control.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "job/control.h"
#include "job/control_socket.h"
#include "job/launch.h"
#include "job/tcp_control.h"

namespace sbtrain {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Short enough for tests, long enough for a machine that is busy with others.
inline constexpr Deadlines kPatient{.rendezvous = milliseconds(20000),
                                    .progress = milliseconds(20000),
                                    .heartbeat = milliseconds(20)};
inline constexpr Deadlines kHasty{
    .rendezvous = milliseconds(500), .progress = milliseconds(500), .heartbeat = milliseconds(20)};

// The launches of a job on this machine, whose rank 0 listens already.
inline std::vector<Launch> launches(int world, const std::string& address = "127.0.0.1") {
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

inline std::vector<int> all_ranks(int world) {
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Runs `work` with the Control of every rank in `ranks`, each in a thread of its own.
inline void run_ranks(const std::vector<Launch>& jobs, const std::vector<int>& ranks,
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

inline void run_world(int world, const Deadlines& deadlines,
                      const std::function<void(Control&)>& work) {
  run_ranks(launches(world), all_ranks(world), deadlines, work);
}

// Waits until the job has failed.
inline JobFailure wait_for_failure(const Control& control) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!control.failure() && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  return control.failure().value_or(JobFailure{.code = ExitCode::kDone, .message = "no failure"});
}

inline bool contains(const std::string& text, const std::string& part) {
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

[[noreturn]] inline void work_for_ever(Control& control) {
  for (int step = 1;; ++step) {
    control.check();
    control.progress(fmt::format("step {}", step));
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// Returns when the ranks that are threads of this test have passed an exchange with all others.
inline void meet(Control& control, std::atomic<int>& arrived, int threads) {
  control.exchange("all are there", all_ranks(control.world()), "");
  ++arrived;
  while (arrived < threads) std::this_thread::sleep_for(milliseconds(1));
}

[[noreturn]] inline void exchange_and_work(Control& control) {
  control.exchange("all are there", all_ranks(control.world()), "");
  work_for_ever(control);
}

}  // namespace sbtrain
