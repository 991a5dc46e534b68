// The progress line of a run.
//
// On a terminal one line is redrawn in place, at most ten times a second, and shortened to the
// terminal's width. Elsewhere (a log file, a pipe) a plain line is printed from time to time, every
// 5 seconds at first and up to a minute apart later.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace sbtrain {

class LogSink;

// The values of the line; NaN: unknown, not shown.
struct ProgressState {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  int64_t step = 0;
  int64_t total_steps = 0;
  double loss = kUnknown;
  double lr = kUnknown;
  double grad_norm = kUnknown;
  double tokens_per_second = kUnknown;
  int ranks = 1;
  double exposed = kUnknown;  // part of the time for which computation waits for ranks, 0 to 1
  double mfu = kUnknown;      // 0 to 1
  double seconds_left = kUnknown;
};

struct ProgressStyle {
  int width = 0;  // columns of the terminal; 0: plain text without a bar, of any length
  bool unicode = false;
  bool colour = false;
};

// The line, without an end of line. It is never wider than width - 1 columns: less important fields
// are left out, then the bar.
std::string progress_line(const ProgressState& state, const ProgressStyle& style);

std::string format_seconds(double seconds);  // "0:07", "12:34", "3:25:45", "2d 03:25"
std::string format_count(double count);      // "950", "12.9k", "1.25M"

// Thread-safe. Never waits for a terminal that accepts no output (after Ctrl-S): redraws are left
// out, and other text is kept until the terminal accepts it.
class Progress {
 public:
  explicit Progress(int fd = 2);
  ~Progress();  // the last state stays on the screen
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ProgressState& state);
  // Prints a line of text above the progress line. An end of line is added if it is missing.
  void print(std::string_view text);

 private:
  using Clock = std::chrono::steady_clock;

  ProgressStyle style() const;
  std::string redrawn() const;
  bool due(Clock::time_point now) const;
  void emit(std::string_view text, bool wait = false);

  const int fd_;
  const bool terminal_;
  std::mutex mutex_;
  ProgressState state_;
  bool drawn_ = false;   // a progress line is on the screen
  std::string pending_;  // text that the terminal has not accepted yet
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = Clock::time_point::min();
};

// A log sink for standard error that knows about the progress line: while a Progress exists, log
// lines appear above it. The command line installs it for the log.
std::shared_ptr<LogSink> make_progress_sink();

// While one exists, lines of the log below a warning wait, so that they do not stand between those
// of a table, or in a text, that a command prints on the same terminal; then they are shown. For
// the progress sinks that there are. There is one at a time.
class HeldLog {
 public:
  HeldLog();
  ~HeldLog();
  HeldLog(const HeldLog&) = delete;
  HeldLog& operator=(const HeldLog&) = delete;
};

}  // namespace sbtrain
