// Errors with context. Libraries throw Error; only main turns it into an exit code.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace sbtrain {

// Process exit codes, one per kind of failure; scripts and schedulers may rely on them.
enum class ExitCode : int {
  kDone = 0,
  kInternal = 1,       // a bug in sbtrain
  kUsage = 2,          // command line
  kConfig = 3,         // configuration, or a resume that does not match the run
  kData = 4,           // data missing or corrupt
  kNoCheckpoint = 5,   // no usable checkpoint
  kDiverged = 6,       // non-finite loss or gradients, too many steps in a row
  kCommunication = 7,  // a rank was lost or timed out
  kOutOfMemory = 8,
  kStorage = 9,     // disk full or I/O errors while saving
  kPreempted = 85,  // asked to stop, saved, may be resumed
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Throws Error(code, formatted message). The message names the file, key, tensor or line, and
// says what to do.
template <typename... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Checks an invariant of the program itself; a failure is a bug. The arguments are evaluated
// whether or not the condition holds, so those that are costly to compute (describe()) belong in
// `if (!condition) fail(...)` instead.
template <typename... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(ExitCode::kInternal, format, std::forward<Args>(args)...);
}

}  // namespace sbtrain
