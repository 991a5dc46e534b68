// What every communicator must do, as checks that all of its ranks run together: threads of one
// process, or processes of their own.
#pragma once

#include <string_view>
#include <vector>

#include "parallel/communicator.h"

namespace sbtrain::test {

struct CommunicatorCheck {
  std::string_view name;
  void (*run)(Communicator& ranks, Stream& s);
  // Ranks make different calls. Afterwards the communicator may be of no use.
  bool misuse = false;
  // It takes 7 GB of the stream's device.
  bool large = false;
};

// In the order in which a rank runs them. Failures are GoogleTest's, on the rank that sees them.
const std::vector<CommunicatorCheck>& communicator_checks();

}  // namespace sbtrain::test
