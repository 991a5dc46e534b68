#pragma once

#include <string>

namespace sbtrain {

// The name of this machine, for messages, locks and logs; "unknown" where it has none.
std::string host_name();

}  // namespace sbtrain
