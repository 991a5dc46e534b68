#include <unistd.h>

#include <cstdlib>

#include "cli/cli.h"
#include "core/standard_streams.h"

namespace {

// libgomp's threads spin for milliseconds when they wait for each other, and so keep the core from
// the very thread they wait for as soon as another program runs: steps take ten times as long.
// Short spins cost nothing on an idle machine. The setting is read before main, so it takes a new
// start of the program; what the user has set stands.
void shorten_spins(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  setenv("GOMP_SPINCOUNT", "2000", 1);
  execv("/proc/self/exe", argv);  // returns where there is no /proc: then without
}

}  // namespace

int main(int argc, char** argv) {
  sbtrain::open_standard_streams();
  shorten_spins(argv);
  return sbtrain::run_command_line({argv + 1, argv + argc});
}
