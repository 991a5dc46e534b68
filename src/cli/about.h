// What this program and this machine are, in words: --version and `sbtrain doctor`.
#pragma once

#include <string>

namespace sbtrain {

// "sbtrain 0.2.0 (REVISION)", then what was compiled and which libraries of several GPUs, of
// softmax attention and of several ranks it finds, one a line.
std::string version_text();

}  // namespace sbtrain
