// The standard streams: open whatever the caller left of them, and checked at the end.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace sbtrain {

// Opens those of descriptors 0, 1 and 2 that are closed; to be called before any file is opened.
// A file that took the number of a closed standard stream would receive the program's messages.
// Reading then finds the end, writing fails as it would on the closed descriptor.
void open_standard_streams();

// Whether all that was printed to standard output has been taken; flushes it. `reason` says why
// not.
bool flush_output(std::string& reason);

// Writes to standard error. A reader that is gone is no reason to end the work.
void write_error(std::string_view text) noexcept;

template <typename... Args>
void print_error(fmt::format_string<Args...> format, Args&&... args) {
  write_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sbtrain
