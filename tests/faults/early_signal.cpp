// Asks the process to stop while its libraries initialise themselves.
#include <csignal>

namespace {

[[gnu::constructor]] void stop() {
  std::raise(SIGTERM);
}

}  // namespace
