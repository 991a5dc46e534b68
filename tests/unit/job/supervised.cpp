// The program of supervisor_test.cpp. Started by the test it supervises RANKS copies of itself;
// started by the supervisor it is a rank and does as it is told:
//
//   supervised RANKS GRACE_MS FOLDER BEHAVIOUR [ARGUMENT...]
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/standard_streams.h"
#include "job/launch.h"
#include "job/supervisor.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

volatile std::sig_atomic_t counts[65];

void count(int signal) {
  counts[signal] = counts[signal] + 1;
}

void pause_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

[[noreturn]] void sleep_for_ever() {
  for (;;) pause_ms(1000);
}

void write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path.string() + ".tmp") << text;
  fs::rename(path.string() + ".tmp", path);
}

struct Rank {
  const Launch launch = find_launch(process_environment());
  const fs::path folder;
  const std::vector<std::string> arguments;

  int number(size_t i) const { return std::stoi(arguments.at(i)); }
  bool is_chosen() const { return launch.rank == number(0); }

  int run(const std::string& behaviour) const {
    write_file(folder / ("pid-" + std::to_string(launch.rank)), std::to_string(::getpid()));
    if (behaviour == "report") return report();
    if (behaviour == "exit") return is_chosen() ? number(1) : 0;
    if (behaviour == "exit all") return number(0);
    if (behaviour == "fail and hang") return fail_and_hang();
    if (behaviour == "kill") return kill_one();
    if (behaviour == "count") return count_signals();
    if (behaviour == "held") return take_held_signal();
    if (behaviour == "sleep") sleep_for_ever();
    if (behaviour == "control") return fail_in_job([] { fail(ExitCode::kData, "bad block"); });
    if (behaviour == "stop") {
      return fail_in_job([] { ::raise(SIGSTOP); }, {.progress = std::chrono::seconds(1),
                                                    .heartbeat = std::chrono::milliseconds(100)});
    }
    return 99;
  }

  // What a rank sees of its surroundings.
  int report() const {
    std::printf("out of rank %d\n", launch.rank);
    std::fflush(stdout);
    write_error(fmt::format("error of rank {} of {} at port {}, unfinished", launch.rank,
                            launch.world, launch.port > 0 ? "some" : "no"));
    return std::getchar() == EOF && std::getenv("OMP_NUM_THREADS") != nullptr ? 0 : 98;
  }

  int fail_and_hang() const {
    if (is_chosen()) {
      write_error("error: something specific\n");
      return number(1);
    }
    std::signal(SIGTERM, SIG_IGN);
    sleep_for_ever();
  }

  int kill_one() const {
    if (is_chosen()) ::raise(number(1));
    sleep_for_ever();
  }

  // Until SIGTERM comes, and a while longer; then writes how often each signal came.
  int count_signals() const {
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2}) std::signal(signal, count);
    write_file(folder / ("ready-" + std::to_string(launch.rank)), "");
    while (counts[SIGTERM] == 0) pause_ms(5);
    pause_ms(200);
    write_file(folder / ("counts-" + std::to_string(launch.rank)),
               fmt::format("{} {} {} {}", counts[SIGTERM], counts[SIGINT], counts[SIGUSR1],
                           counts[SIGUSR2]));
    return static_cast<int>(ExitCode::kPreempted);
  }

  // A signal that was blocked from the start of the process waits for its handler.
  static int take_held_signal() {
    pause_ms(300);
    std::signal(SIGTERM, count);
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigprocmask(SIG_UNBLOCK, &stop, nullptr);
    while (counts[SIGTERM] == 0) pause_ms(5);
    return static_cast<int>(ExitCode::kPreempted);
  }

  // A whole job: the ranks meet, one does what ends it, the others learn why.
  int fail_in_job(const std::function<void()>& end, const Deadlines& deadlines = {}) const {
    const auto control = make_control(launch, deadlines);
    try {
      control->exchange("all are there", std::vector<int>{0, 1, 2}, "");
      if (is_chosen()) end();
      control->exchange("never", std::vector<int>{0, 1, 2}, "");
    } catch (const Error& error) {
      control->report({.code = error.code(), .message = error.what()});
    }
    if (control->shows_failure()) write_error("error: " + control->failure()->message + "\n");
    return static_cast<int>(control->failure()->code);
  }
};

int run(const std::vector<std::string>& arguments) {
  const std::vector<std::string> rest(arguments.begin() + 4, arguments.end());
  if (std::getenv(kSupervisorToken) != nullptr) {
    const Rank rank{.folder = arguments[2], .arguments = rest};
    return rank.run(arguments[3]);
  }
  return static_cast<int>(supervise({.arguments = arguments,
                                     .ranks = std::stoi(arguments[0]),
                                     .grace = std::chrono::milliseconds(std::stoi(arguments[1]))}));
}

}  // namespace
}  // namespace sbtrain

// LeakSanitizer stops a process that ends, to look at its memory. When another rank has ended, the
// supervisor continues those that are stopped; if that comes in between, the sanitizer waits for
// the stop for ever.
extern "C" const char* __asan_default_options() {  // NOLINT: the sanitizer's name
  return "detect_leaks=0";
}

int main(int argc, char** argv) {
  return sbtrain::run({argv + 1, argv + argc});
}
