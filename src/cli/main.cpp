#include <unistd.h>

#include <cstdlib>

#include "cli/cli.h"
#include "core/standard_streams.h"
#include "train/signals.h"

namespace {

// libgomp's threads spin for milliseconds when they wait for each other. If another program runs,
// they keep the core from the thread that they wait for, and steps take ten times as long. Short
// spins cost nothing on an idle machine. libgomp reads the setting before main, so the program must
// start again with it; a value that the user has set is kept.
void shorten_spins(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  setenv("GOMP_SPINCOUNT", "2000", 1);
  execv("/proc/self/exe", argv);  // returns if there is no /proc; the setting then has no effect
}

}  // namespace

int main(int argc, char** argv) {
  sbtrain::open_standard_streams();
  sbtrain::hold_stop_signals();
  shorten_spins(argv);
  return sbtrain::run_command_line({argv + 1, argv + argc});
}
