// The standard streams are all opened at the start, and checked at the end.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace sbtrain {

// Opens those of descriptors 0, 1 and 2 that are closed. To be called before any file is opened: a
// file that took the number of a closed standard stream would receive the program's messages.
// Reading from such a stream finds its end, and writing fails as on a closed descriptor.
void open_standard_streams();

// Flushes standard output. False when not all that was printed could be written; `reason` then says
// why.
bool flush_output(std::string& reason);

// Writes to standard error. Failures are ignored: a reader that is gone does not end the work.
void write_error(std::string_view text) noexcept;

template <typename... Args>
void print_error(fmt::format_string<Args...> format, Args&&... args) {
  write_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sbtrain
