#include "train/progress.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/log.h"
#include "core/number_text.h"

namespace sbtrain {

namespace {

constexpr char kClearLine[] = "\r\x1b[K";

// ---- The line --------------------------------------------------------------------------------

struct Field {
  std::string label;  // drawn faint
  std::string value;
  std::string unit;  // drawn faint
  int rank = 0;      // fields of the highest rank are left out first; rank 0 stays

  size_t width() const {
    return label.size() + !label.empty() + value.size() + unit.size() + !unit.empty();
  }
};

std::string faint(const std::string& text, const ProgressStyle& style) {
  return style.colour ? "\x1b[2m" + text + "\x1b[0m" : text;
}

std::string draw(const Field& field, const ProgressStyle& style) {
  std::string text;
  if (!field.label.empty()) text += faint(field.label, style) + ' ';
  text += field.value;
  if (!field.unit.empty()) text += ' ' + faint(field.unit, style);
  return text;
}

std::vector<Field> make_fields(const ProgressState& s, bool plain) {
  std::vector<Field> fields;
  if (s.total_steps > 0) {
    const int percent = static_cast<int>(100 * s.step / s.total_steps);
    fields.push_back({"", fmt::format("{:3}%", percent), "", 1});
  }
  // The number is padded, so that nothing moves while it grows.
  const std::string total = std::to_string(s.total_steps);
  fields.push_back(
      {plain ? "step" : "", fmt::format("{:>{}}/{}", s.step, total.size(), total), "", 0});
  const auto add = [&](bool known, Field field) {
    if (known) fields.push_back(std::move(field));
  };
  // A loss that is not a number is shown, since it is important; other such values are unknown.
  add(s.step > 0, {"loss", fmt::format("{:.4f}", without_nan_sign(s.loss)), "", 0});
  add(!std::isnan(s.lr), {"lr", fmt::format("{:.2e}", s.lr), "", 4});
  add(!std::isnan(s.grad_norm), {"norm", fmt::format("{:.2f}", s.grad_norm), "", 5});
  add(std::isfinite(s.tokens_per_second),
      {"", fmt::format("{:>5}", format_count(s.tokens_per_second)), "tok/s", 3});
  add(s.ranks > 1 && std::isfinite(s.tokens_per_second),
      {"", format_count(s.tokens_per_second / s.ranks), "each", 7});
  add(std::isfinite(s.exposed), {"comm", fmt::format("{:.1f}%", 100 * s.exposed), "", 8});
  add(std::isfinite(s.mfu), {"MFU", fmt::format("{:.1f}%", 100 * s.mfu), "", 6});
  add(std::isfinite(s.seconds_left), {"eta", format_seconds(s.seconds_left), "", 2});
  return fields;
}

constexpr size_t kGap = 2;  // columns between fields
constexpr size_t kSmallestBar = 10;
constexpr size_t kLargestBar = 30;
constexpr int kLastBeforeBar = 4;  // fields of a higher rank give way to the bar

size_t total_width(const std::vector<Field>& fields) {
  size_t width = 0;
  for (const Field& field : fields) width += field.width() + kGap;
  return width - kGap;
}

// Leaves out fields of a rank above `keep`, the highest rank first, until the rest fits.
void drop_fields(std::vector<Field>& fields, size_t room, int keep) {
  while (total_width(fields) > room) {
    const auto last = std::max_element(fields.begin(), fields.end(),
                                       [](const auto& a, auto& b) { return a.rank < b.rank; });
    if (last->rank <= keep) return;
    fields.erase(last);
  }
}

// The width of the bar is a multiple of five, so that it does not change with every field's width.
size_t bar_width(size_t room, size_t used) {
  if (room < used + kSmallestBar) return 0;
  return std::min((room - used) / 5 * 5, kLargestBar);
}

std::string draw_bar(double done, int cells, const ProgressStyle& style) {
  const int full = std::clamp(static_cast<int>(done * cells), 0, cells);
  const char* piece = style.unicode ? "━" : "=";
  const char* rest = style.unicode ? "─" : "-";
  std::string left;
  std::string right;
  for (int i = 0; i < full; ++i) left += piece;
  for (int i = full; i < cells; ++i) right += rest;
  if (style.colour) left = "\x1b[36m" + left + "\x1b[0m";
  return left + faint(right, style);
}

bool set_and_not_empty(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

// Finds the character set as the C library would choose it, without setting a locale.
bool utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (!set_and_not_empty(name)) continue;
    std::string value = std::getenv(name);
    std::transform(value.begin(), value.end(), value.begin(), ::tolower);
    return value.find("utf-8") != std::string::npos || value.find("utf8") != std::string::npos;
  }
  return false;
}

bool dumb_terminal() {
  const char* term = std::getenv("TERM");
  return term == nullptr || std::string_view(term) == "dumb";
}

// ---- The log sink ----------------------------------------------------------------------------

class ProgressSink : public LogSink {
 public:
  void attach(Progress* progress) {
    const std::lock_guard lock(mutex_);
    progress_ = progress;
  }
  void detach(const Progress* progress) {
    const std::lock_guard lock(mutex_);
    if (progress_ == progress) progress_ = nullptr;
  }

  void hold() {
    const std::lock_guard lock(mutex_);
    holds_ = true;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    holds_ = false;
    show(std::exchange(held_, {}));
  }

  void write(const LogLine& line) override {
    const std::string text = coloured(line);
    const std::lock_guard lock(mutex_);
    if (holds_ && line.level < LogLevel::kWarning) {
      held_ += text;
    } else {
      show(text);
    }
  }

 private:
  void show(const std::string& text) {
    if (progress_ != nullptr && !text.empty()) {
      progress_->print(text);
      return;
    }
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t n = ::write(STDERR_FILENO, rest.data(), rest.size());
      if (n < 0 && errno != EINTR) return;
      rest.remove_prefix(static_cast<size_t>(std::max<ssize_t>(n, 0)));
    }
  }

  std::string coloured(const LogLine& line) const {
    std::string text(line.text);
    if (!colour_ || line.colour_end <= line.colour_begin) return text;
    const char* code = line.level >= LogLevel::kError     ? "\x1b[31m"
                       : line.level == LogLevel::kWarning ? "\x1b[33m"
                                                          : "\x1b[32m";
    text.insert(line.colour_end, "\x1b[0m");
    text.insert(line.colour_begin, code);
    return text;
  }

  std::mutex mutex_;
  Progress* progress_ = nullptr;
  bool holds_ = false;
  std::string held_;
  const bool colour_ =
      ::isatty(STDERR_FILENO) != 0 && !set_and_not_empty("NO_COLOR") && !dumb_terminal();
};

template <typename Visit>
void for_each_progress_sink(Visit visit) {
  for_each_log_sink([&](LogSink& sink) {
    if (auto* progress_sink = dynamic_cast<ProgressSink*>(&sink)) visit(*progress_sink);
  });
}

}  // namespace

std::string format_seconds(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e15)));
  const int64_t days = total / 86400;
  const int64_t hours = total / 3600 % 24;
  const int64_t minutes = total / 60 % 60;
  if (days > 0) return fmt::format("{}d {:02}:{:02}", days, hours, minutes);
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, total % 60);
  return fmt::format("{}:{:02}", minutes, total % 60);
}

std::string format_count(double count) {
  if (count < 999.5) return fmt::format("{:.0f}", count);
  if (count < 999.95e3) return fmt::format("{:.1f}k", count / 1e3);
  if (count < 999.995e6) return fmt::format("{:.2f}M", count / 1e6);
  return fmt::format("{:.2f}G", count / 1e9);
}

std::string progress_line(const ProgressState& state, const ProgressStyle& style) {
  const bool bounded = style.width > 0;
  std::vector<Field> fields = make_fields(state, !bounded);
  const size_t room = bounded ? static_cast<size_t>(std::max(style.width - 1, 1)) : SIZE_MAX;
  const bool has_bar = bounded && state.total_steps > 0 && room > kSmallestBar + kGap;
  if (has_bar) drop_fields(fields, room - kSmallestBar - kGap, kLastBeforeBar);
  drop_fields(fields, room, 0);
  const size_t bar = has_bar ? bar_width(room, total_width(fields) + kGap) : 0;

  std::string line;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) line.append(kGap, ' ');
    line += draw(fields[i], style);
    if (i == 0 && bar > 0) {
      const double done = static_cast<double>(state.step) / static_cast<double>(state.total_steps);
      line.append(kGap, ' ');
      line += draw_bar(done, static_cast<int>(bar), style);
    }
  }
  // If the line is still too wide, only the two fields of rank 0 are left; they are drawn plain.
  if (total_width(fields) > room) {
    line = progress_line(state, {.width = 0});
    line.resize(std::min(line.size(), room));
  }
  return line;
}

Progress::Progress(int fd) : fd_(fd), terminal_(::isatty(fd) != 0 && !dumb_terminal()) {
  for_each_progress_sink([this](ProgressSink& sink) { sink.attach(this); });
}

Progress::~Progress() {
  for_each_progress_sink([this](ProgressSink& sink) { sink.detach(this); });
  const std::lock_guard lock(mutex_);
  std::string end;
  if (terminal_ && drawn_) end = redrawn() + '\n';
  emit(end, /*wait=*/true);
}

ProgressStyle Progress::style() const {
  if (!terminal_) return {};
  winsize size{};
  const bool known = ::ioctl(fd_, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return {.width = known ? size.ws_col : 80,
          .unicode = utf8_locale(),
          .colour = !set_and_not_empty("NO_COLOR")};
}

// The sequence that replaces the line on the screen. It is written at once, so nothing flickers.
std::string Progress::redrawn() const {
  return '\r' + progress_line(state_, style()) + "\x1b[K";
}

bool Progress::due(Clock::time_point now) const {
  using std::chrono::seconds;
  if (last_ == Clock::time_point::min() || state_.step == state_.total_steps) return true;
  if (terminal_) return now - last_ >= std::chrono::milliseconds(100);
  const Clock::duration apart =
      std::clamp<Clock::duration>((now - start_) / 10, seconds(5), seconds(60));
  return now - last_ >= apart;
}

void Progress::update(const ProgressState& state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
  const Clock::time_point now = Clock::now();
  if (!due(now)) return;
  last_ = now;
  if (!terminal_) {
    emit(progress_line(state_, style()) + '\n');
  } else if (pollfd ready{fd_, POLLOUT, 0}; ::poll(&ready, 1, 0) == 1) {
    drawn_ = true;
    emit(redrawn());
  }
}

void Progress::print(std::string_view text) {
  const std::lock_guard lock(mutex_);
  std::string lines(text);
  if (lines.empty() || lines.back() != '\n') lines += '\n';
  if (drawn_) lines = kClearLine + lines + redrawn();
  emit(lines);
}

// Writes pending text and `text`. Unless `wait` is set, text that the other side does not accept
// now stays pending.
void Progress::emit(std::string_view text, bool wait) {
  pending_ += text;
  while (!pending_.empty()) {
    pollfd ready{fd_, POLLOUT, 0};
    if (::poll(&ready, 1, wait ? 2000 : 0) != 1) return;
    const ssize_t n = ::write(fd_, pending_.data(), pending_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {  // nobody reads the output any more
      pending_.clear();
      return;
    }
    pending_.erase(0, static_cast<size_t>(n));
  }
}

std::shared_ptr<LogSink> make_progress_sink() {
  return std::make_shared<ProgressSink>();
}

HeldLog::HeldLog() {
  for_each_progress_sink([](ProgressSink& sink) { sink.hold(); });
}
HeldLog::~HeldLog() {
  std::fflush(stdout);  // what is shown now comes after what has been printed
  for_each_progress_sink([](ProgressSink& sink) { sink.release(); });
}

}  // namespace sbtrain
