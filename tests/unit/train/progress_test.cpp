#include "train/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include "core/log.h"

namespace sbtrain {
namespace {

ProgressState make_state(int64_t step = 1240) {
  return {.step = step,
          .total_steps = 3000,
          .loss = 4.21354,
          .lr = 9.8e-4,
          .grad_norm = 0.831,
          .tokens_per_second = 12900,
          .mfu = 0.412,
          .seconds_left = 133};
}

// Columns that a line takes: code points without escape sequences.
int columns(const std::string& line) {
  int count = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\x1b') {
      while (line[i] != 'm' && line[i] != 'K') ++i;
    } else if ((static_cast<unsigned char>(line[i]) & 0xC0) != 0x80) {
      ++count;
    }
  }
  return count;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ProgressLine, PlainTextShowsEverything) {
  EXPECT_EQ(progress_line(make_state(), {}),
            " 41%  step 1240/3000  loss 4.2135  lr 9.80e-04  norm 0.83  12.9k tok/s  MFU 41.2%  "
            "eta 2:13");
}

TEST(ProgressLine, UnknownValuesAreNotShown) {
  ProgressState state;
  state.step = 1;
  state.total_steps = 10;
  state.loss = 8.5;
  EXPECT_EQ(progress_line(state, {}), " 10%  step  1/10  loss 8.5000");
}

TEST(ProgressLine, ALossThatIsNotANumberIsShown) {
  ProgressState state = make_state();
  for (const double nan : {std::nan(""), -std::nan("")}) {
    state.loss = nan;
    EXPECT_TRUE(contains(progress_line(state, {}), "loss nan"));
  }
}

TEST(ProgressLine, FitsEveryWidthInEveryStyle) {
  for (int width = 1; width <= 200; ++width) {
    for (const bool unicode : {false, true}) {
      for (const bool colour : {false, true}) {
        for (const int64_t step : {0, 1, 1240, 3000}) {
          const std::string line = progress_line(make_state(step), {width, unicode, colour});
          ASSERT_LT(columns(line), std::max(width, 2)) << line;
          if (width > 40 && step > 0) {
            ASSERT_TRUE(contains(line, "4.2135")) << line;
          }
        }
      }
    }
  }
}

TEST(ProgressLine, EightyColumnsHoldABarAndWhatMattersMost) {
  EXPECT_EQ(progress_line(make_state(), {.width = 80}),
            " 41%  ====------  1240/3000  loss 4.2135  lr 9.80e-04  12.9k tok/s  eta 2:13");
}

TEST(ProgressLine, TheBarGrowsWithTheStep) {
  const auto filled = [](int64_t step) {
    const std::string line = progress_line(make_state(step), {.width = 150});
    return std::count(line.begin(), line.end(), '=');
  };
  EXPECT_EQ(filled(0), 0);
  EXPECT_EQ(filled(1500), 15);
  EXPECT_EQ(filled(3000), 30);
}

TEST(ProgressLine, Units) {
  EXPECT_EQ(format_seconds(0), "0:00");
  EXPECT_EQ(format_seconds(59.6), "1:00");
  EXPECT_EQ(format_seconds(754), "12:34");
  EXPECT_EQ(format_seconds(12345), "3:25:45");
  EXPECT_EQ(format_seconds(2 * 86400 + 12345), "2d 03:25");
  EXPECT_EQ(format_count(950.4), "950");
  EXPECT_EQ(format_count(999.7), "1.0k");
  EXPECT_EQ(format_count(12900), "12.9k");
  EXPECT_EQ(format_count(1.25e6), "1.25M");
  EXPECT_EQ(format_count(3.5e9), "3.50G");
}

TEST(Progress, AFileGetsPlainLines) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    Progress progress(ends[1]);
    for (int64_t step = 1; step <= 3000; ++step) progress.update(make_state(step));
    progress.print("validation  loss 3.0");
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(ends[0]);
  EXPECT_FALSE(contains(text, "\x1b"));
  EXPECT_FALSE(contains(text, "\r"));
  EXPECT_TRUE(contains(text, "  0%  step    1/3000"));
  EXPECT_TRUE(contains(text, "100%  step 3000/3000"));
  EXPECT_TRUE(contains(text, "validation  loss 3.0\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);  // first, last, validation
}

class Terminal {
 public:
  Terminal(unsigned short columns, const char* term = "xterm") {
    setenv("TERM", term, 1);
    winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(openpty(&master_, &slave_, nullptr, nullptr, &size), 0);
    fcntl(master_, F_SETFL, O_NONBLOCK);
  }
  ~Terminal() {
    close(master_);
    close(slave_);
  }
  int fd() const { return slave_; }
  std::string shown() const {
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(master_, buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
    return text;
  }

 private:
  int master_ = -1;
  int slave_ = -1;
};

TEST(Progress, ATerminalLineIsRedrawnInPlace) {
  const Terminal terminal(120);
  {
    Progress progress(terminal.fd());
    progress.update(make_state(1));
    const std::string first = terminal.shown();
    EXPECT_EQ(first.rfind('\r', 0), 0U);
    EXPECT_FALSE(contains(first, "\n"));
    EXPECT_TRUE(contains(first, "1/3000"));
    EXPECT_LE(columns(first), 120);  // the line and its carriage return
    for (int64_t step = 2; step < 100; ++step) progress.update(make_state(step));
    EXPECT_LT(terminal.shown().size(), 20 * first.size());  // not one redraw per step

    progress.print("validation  loss 3.0");
    const std::string above = terminal.shown();
    EXPECT_EQ(above.rfind("\r\x1b[Kvalidation  loss 3.0\r\n\r", 0), 0U) << above;
    EXPECT_TRUE(contains(above, "99/3000"));
  }
  const std::string end = terminal.shown();
  EXPECT_EQ(end.substr(end.size() - 2), "\r\n");
}

TEST(Progress, ADumbTerminalGetsPlainLines) {
  const Terminal terminal(80, "dumb");
  Progress progress(terminal.fd());
  progress.update(make_state(1));
  EXPECT_FALSE(contains(terminal.shown(), "\x1b"));
}

// If a write waits for the terminal, this test hangs until CTest's limit.
TEST(Progress, AStoppedTerminalDoesNotStopTheRun) {
  const Terminal terminal(100);
  Progress progress(terminal.fd());
  ASSERT_EQ(tcflow(terminal.fd(), TCOOFF), 0);
  progress.update(make_state(1));
  progress.print("kept for later");
  EXPECT_EQ(terminal.shown(), "");
  ASSERT_EQ(tcflow(terminal.fd(), TCOON), 0);
  progress.print("now");
  const std::string shown = terminal.shown();
  EXPECT_LT(shown.find("kept for later"), shown.find("now"));
}

TEST(Progress, LogLinesAppearAboveTheLine) {
  set_log_sink(make_progress_sink());
  {
    const Terminal terminal(100);
    Progress progress(terminal.fd());
    progress.update(make_state(1));
    terminal.shown();
    log_warning("careful");
    const std::string shown = terminal.shown();
    EXPECT_EQ(shown.rfind("\r\x1b[K", 0), 0U);
    EXPECT_TRUE(contains(shown, "careful\r\n\r"));
    EXPECT_TRUE(contains(shown, "1/3000"));
  }
  testing::internal::CaptureStderr();
  log_warning("alone");
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), "alone\n"));
  set_log_sink(nullptr);
}

// What goes on is told after a table, what is wrong at once.
TEST(Progress, AHeldLogWaits) {
  set_log_sink(make_progress_sink());
  testing::internal::CaptureStderr();
  {
    const HeldLog held;
    log_info("which kernel runs");
    log_warning("careful");
    log_info("and another");
    // In the order in which they are shown, the table before what waits.
    std::fputs("table\n", stderr);
  }
  log_info("later");
  const std::string shown = testing::internal::GetCapturedStderr();
  size_t last = 0;
  for (const char* line : {"careful", "table", "which kernel runs", "and another", "later"}) {
    const size_t at = shown.find(line);
    ASSERT_NE(at, std::string::npos) << line;
    EXPECT_GE(at, last) << line;
    last = at;
  }
  set_log_sink(nullptr);
}

}  // namespace
}  // namespace sbtrain
