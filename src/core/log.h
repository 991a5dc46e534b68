// The log of the program: lines of a level, formatted as {fmt} does, for the sinks of this process.
//
// This header stands in for the logging library (spdlog), which only log.cpp includes, since its
// headers take longer to compile than most files that log a line.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

namespace sbtrain {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// A line with its time and level in front and its end of line.
struct LogLine {
  LogLevel level;
  std::string_view text;
  size_t colour_begin,
      colour_end;  // the part of the text that a terminal shows in the level's colour
};

// Where lines go. write() is called for one line at a time, from any thread.
class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(const LogLine& line) = 0;
};

// All lines go to `sink` alone; null: to standard output, as at the program's start.
void set_log_sink(std::shared_ptr<LogSink> sink);
// Lines go to `sink`, too.
void add_log_sink(std::shared_ptr<LogSink> sink);
// The sinks that there are take only lines of `level` and above; sinks that are added later take
// all.
void limit_log_sinks(LogLevel level);
// A line for the sinks that add_log_sink() has added alone, where the others' readers learn of it
// in another way.
void log_to_added_sinks(LogLevel level, std::string_view text);
void for_each_log_sink(const std::function<void(LogSink&)>& visit);

// Lines below the level, at first kInfo, are left out everywhere.
LogLevel log_level();
void set_log_level(LogLevel level);

void log_line(LogLevel level, std::string_view text);
// The same for the first line of this text in the process; later ones are left out.
void log_line_once(LogLevel level, std::string_view text);

template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() > LogLevel::kDebug) return;
  log_line(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_info_once(fmt::format_string<Args...> format, Args&&... args) {
  log_line_once(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sbtrain
