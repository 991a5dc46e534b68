#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "cli/cli.h"
#include "core/cpu_level.h"
#include "core/error.h"
#include "core/standard_streams.h"
#include "train/signals.h"

namespace {

// A sanitizer's runtime is not ready before main, and its functions take the place of libc's.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SBTRAIN_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SBTRAIN_SANITIZED 1
#endif
#endif

#ifndef SBTRAIN_SANITIZED
// The loader calls these before the libraries initialise themselves, so that no instruction runs
// that this processor does not have, and a request to stop is kept from then on. Only while it maps
// and links the libraries, the signal still ends the process.
using Initializer = void (*)();
[[gnu::section(".preinit_array"), gnu::used]] const Initializer kBeforeLibraries[] = {
    sbtrain::require_cpu_level, sbtrain::hold_stop_signals};
#endif

// libgomp's threads spin for milliseconds when they wait for each other. If another program runs,
// they keep the core from the thread that they wait for, and steps take ten times as long. Short
// spins cost nothing on an idle machine. libgomp reads the setting before main, so the program must
// start again with it; a value that the user has set is kept.
void shorten_spins(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  setenv("GOMP_SPINCOUNT", "2000", 1);
  execv("/proc/self/exe", argv);  // returns if there is no /proc; the setting then has no effect
}

// Threads have stacks of this limit too, and a stack that ends raises a signal that says nothing.
bool has_stack() {
  constexpr rlim_t kLeastBytes = rlim_t{1} << 20;
  rlimit stack{};
  if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= kLeastBytes) return true;
  sbtrain::write_error(
      fmt::format("error: the stack of a thread is limited to {} KiB, and sbtrain needs {}: ulimit "
                  "-s {}\n",
                  stack.rlim_cur >> 10, kLeastBytes >> 10, 8 * kLeastBytes >> 10));
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  sbtrain::open_standard_streams();
  if (!has_stack()) return static_cast<int>(sbtrain::ExitCode::kOutOfMemory);
  sbtrain::hold_stop_signals();
  std::signal(SIGCHLD, SIG_DFL);  // where the parent ignores it, exit codes of children are lost
  shorten_spins(argv);
  // A program that was started as /proc/self/exe is "exe" to ps and pkill.
  prctl(PR_SET_NAME, program_invocation_short_name);
  return sbtrain::run_command_line({argv + 1, argv + argc});
}
