// sbtrain quickstart: from nothing to a small trained model and a text that it wrote, with the
// files that come with the program. scripts/quickstart.sh builds a bare checkout and calls it.
//
// Steps whose result is there are skipped, and an interrupted training continues. What commands say
// goes to corpus/logs/, but for that of the training.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/cli.h"
#include "core/error.h"
#include "core/installation.h"
#include "core/python.h"
#include "train/signals.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr const char* kText = "corpus/text";
// These have the names in the configuration.
constexpr const char* kConfig = "configs/tiny_sb.yaml";
constexpr const char* kTokenizer = "corpus/tokenizer.model";
constexpr const char* kTrainData = "corpus/train.h5";
constexpr const char* kValidationData = "corpus/val.h5";
constexpr const char* kRun = "runs/tiny_sb";
constexpr const char* kLogs = "corpus/logs";
constexpr int kSteps = 5;
// Of training: most of what the 2000 of the configuration do, in little more than half the time. On
// the small text the validation loss rises from then on.
constexpr int kTrainingSteps = 1200;
constexpr int kTrainingStepsOfSmallText = 500;

struct QuickstartOptions {
  std::string folder = ".";
  bool small_text = false;
  int steps = 0;  // 0: as many as the text is good for
};

// The text that comes with the program: its own documentation, and chapters of Python's tutorial.
Words small_text(const fs::path& files) {
  Words paths;
  for (const fs::path& folder : {files / "docs", files.parent_path() / "doc/sbtrain/docs"}) {
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(folder, none)) {
      if (entry.path().extension() == ".md") paths.push_back(entry.path().string());
    }
  }
  for (const fs::path& file : {files / "tests/data/english.jsonl", files / "data/english.jsonl"}) {
    if (fs::exists(file)) paths.push_back(file.string());
  }
  std::ranges::sort(paths);
  if (paths.empty()) {
    fail(ExitCode::kData,
         "{}: the documentation that comes with sbtrain is not there; give a text "
         "of your own to `sbtrain tokenizer train` and `sbtrain prepare`",
         files.string());
  }
  return paths;
}

// The name that the program was called by, for commands to try.
std::string called() {
  std::ifstream file("/proc/self/cmdline");
  std::string name;
  std::getline(file, name, '\0');
  const bool moved = name.find('/') != std::string::npos && !fs::exists(name);
  return moved || name.empty() ? fs::read_symlink("/proc/self/exe").string() : name;
}

// The last lines of a file, at most `count`.
std::vector<std::string> last_lines(const std::string& path, size_t count) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (lines.size() == count) lines.erase(lines.begin());
    lines.push_back(std::move(line));
  }
  return lines;
}

// On a terminal, the latest line of a log while it is written.
class LatestLine {
 public:
  explicit LatestLine(std::string log) : log_(std::move(log)) {}
  ~LatestLine() {
    if (shown_ != 0) print("\r\x1b[K");
  }
  LatestLine(const LatestLine&) = delete;
  LatestLine& operator=(const LatestLine&) = delete;

  void show() {
    std::error_code none;
    const auto size = fs::file_size(log_, none);
    if (!terminal_ || none || size == shown_) return;
    shown_ = size;
    winsize window{};
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 8;
    const size_t width = (known ? window.ws_col : 80) - 8;
    for (const std::string& line : last_lines(log_, 1)) {
      print(fmt::format("\r\x1b[K      {}", line.substr(0, width)));
    }
  }

 private:
  static void print(const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  const bool terminal_ = ::isatty(STDOUT_FILENO) == 1;
  const std::string log_;
  std::uintmax_t shown_ = 0;  // bytes
};

// Seconds since a moment, for people.
class Stopwatch {
 public:
  int seconds() const {
    return static_cast<int>(std::chrono::duration<double>(Clock::now() - begin_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

class Quickstart {
 public:
  Quickstart(const QuickstartOptions& options, fs::path files)
      : options_(options), files_(std::move(files)) {}

  ExitCode run() {
    for (const auto step : {&Quickstart::fetch, &Quickstart::tokenizer, &Quickstart::tokens,
                            &Quickstart::train, &Quickstart::generate}) {
      const ExitCode code = (this->*step)();
      if (code == ExitCode::kDone) continue;
      if (code == ExitCode::kPreempted) {
        fmt::print("\nStopped. The same command continues.\n");
        return code;
      }
      fmt::print("\nquickstart: step {} of {} has failed with exit code {} (above)\n", step_,
                 kSteps, static_cast<int>(code));
      return code;
    }
    say_loss();
    say_what_next();
    return ExitCode::kDone;
  }

 private:
  void announce(const std::string& what) {
    fmt::print("[{}/{}] {}\n", ++step_, kSteps, what);
    std::fflush(stdout);
    step_time_ = {};
  }
  ExitCode finished(const std::string& what) const {
    fmt::print("      {} ({} s)\n", what, step_time_.seconds());
    std::fflush(stdout);
    return ExitCode::kDone;
  }

  ExitCode fetch() {
    const bool there = fs::exists(fs::path(kText) / "train");
    announce(options_.small_text && !there
                 ? "Taking the text that comes with sbtrain"
                 : "Fetching English text (documentation packages of the distribution, 45 MB)");
    if (there) return finished(kText);
    std::string why = "--small-text";
    if (!options_.small_text) {
      const std::string part = fmt::format("{}.part", kText);  // never half a text by its name
      fs::remove_all(part);
      const int status =
          run_program({python_interpreter(), (files_ / "data/fetch_corpus.py").string(), "--small",
                       "--output", part},
                      "text");
      if (status == 0) {
        fs::rename(part, kText);
        return finished(kText);
      }
      if (signals_.stop_requested()) return ExitCode::kPreempted;
      why = "apt-get or the network is missing (above)";
    }
    small_ = small_text(files_);
    return finished(why + ": the documentation of sbtrain and Python is the text, 0.4 MB");
  }

  ExitCode tokenizer() {
    announce("Training a tokenizer of 4096 pieces");
    const ExitCode code = make(
        kTokenizer, (fs::path(kText) / "train").string(),
        with_input({"tokenizer", "train", "--vocab", "4096", "--output", kTokenizer}, "train"));
    return code == ExitCode::kDone ? finished(kTokenizer) : code;
  }

  ExitCode tokens() {
    announce("Turning the text into tokens");
    Words prepare = {"prepare", "--tokenizer", kTokenizer, "--output", kTrainData};
    ExitCode code{};
    if (!small_.empty()) {
      prepare.insert(prepare.end(), {"--split", "0.2"});
      code = make(kTrainData, kTokenizer, with_input(prepare, ""));
      const fs::path held_out = "corpus/train.validation.h5";
      if (code == ExitCode::kDone && fs::exists(held_out)) fs::rename(held_out, kValidationData);
    } else {
      code = make(kTrainData, kTokenizer, with_input(prepare, "train"));
      prepare[4] = kValidationData;
      if (code == ExitCode::kDone) {
        code = make(kValidationData, kTokenizer, with_input(prepare, "validation"));
      }
    }
    if (code != ExitCode::kDone) return code;
    data_seconds_ = time_.seconds();
    return finished(fmt::format("{}, {}", kTrainData, kValidationData));
  }

  ExitCode train() {
    const int own = small_.empty() ? kTrainingSteps : kTrainingStepsOfSmallText;
    const int steps = options_.steps > 0 ? options_.steps : own;
    announce(
        fmt::format("Training {} for {} steps (a minute or two on 2 cores; Ctrl-C saves and stops)",
                    kConfig, steps));
    const ExitCode code =
        sbtrain({"train", "--config", kConfig, fmt::format("--stages.0.length={} steps", steps)});
    if (code != ExitCode::kDone) return code;
    training_seconds_ = time_.seconds() - data_seconds_;
    return finished("done");
  }

  ExitCode generate() {
    announce("Drawing the loss and writing a text");
    draw_loss();
    fmt::print("\n");
    const ExitCode code =
        sbtrain({"generate", "--checkpoint", kRun, "--prompt", "The kernel", "--max-tokens", "120",
                 "--temperature", "0.8", "--top-p", "0.95", "--seed", "1"});
    fmt::print("\n");
    return code == ExitCode::kDone ? finished("done") : code;
  }

  // A model without its picture is a result too: matplotlib is not part of sbtrain.
  void draw_loss() {
    drawn_ = start({python_interpreter(), (files_ / "scripts/plot_loss.py").string(), kRun},
                   "plot") == 0;
    if (drawn_) return;
    fmt::print(
        "      without a picture of the loss, which Python draws with matplotlib "
        "({}/plot.log says what is missing)\n",
        kLogs);
  }

  static void say_loss() {
    std::vector<std::pair<int64_t, double>> losses;
    std::vector<double> bits;
    std::ifstream file(fmt::format("{}/metrics.jsonl", kRun));
    for (std::string line; std::getline(file, line);) {
      const auto record = nlohmann::json::parse(line, nullptr, false);
      if (!record.is_object() || !record.contains("validation/loss")) continue;
      if (!record["validation/loss"].is_number()) continue;  // null: not finite
      losses.emplace_back(record.value("step", int64_t{0}), record["validation/loss"]);
      if (record.contains("validation/bits_per_byte")) {
        bits.push_back(record["validation/bits_per_byte"]);
      }
    }
    if (losses.empty()) return;
    const auto [first_step, first] = losses.front();
    const auto [last_step, last] = losses.back();
    fmt::print("\nValidation loss  {:.3f} -> {:.3f} nats per token, {:.0f}% less (step {} -> {})\n",
               first, last, 100 * (1 - last / first), first_step, last_step);
    if (!bits.empty()) {
      fmt::print("                 {:.3f} -> {:.3f} bits per byte\n", bits.front(), bits.back());
    }
  }

  void say_what_next() const {
    const std::string program = called();
    fmt::print("Time             {} s data, {} s training, {} s in all\n\n", data_seconds_,
               training_seconds_, time_.seconds());
    fmt::print(
        "The model is in {0}{1}. You can try next, in {2}:\n\n"
        "  {3} generate --checkpoint {0} --prompt \"The state\" --seed 2\n      another text\n"
        "  {3} serve --checkpoint {0}\n      the model in a browser\n"
        "  {3} --config configs/tiny_rope.yaml\n"
        "      the same model with softmax attention and rotary positions\n"
        "  {3} --config {4} --name other --train.lr=2e-3\n"
        "      another learning rate; every key of the configuration is also an option\n"
        "  {3} train --config configs/1b_sb.yaml --dry-run\n"
        "      what a model of a billion parameters would need\n"
        "  {3} --help\n",
        kRun, drawn_ ? fmt::format(", its loss curve in {}/loss.png", kRun) : "",
        fs::current_path().string(), program, kConfig);
  }

  // The command with what it reads: a half of the fetched text, or the small text.
  Words with_input(Words command, const std::string& half) const {
    command.emplace_back("--input");
    if (small_.empty()) {
      command.push_back((fs::path(kText) / half).string());
    } else {
      command.insert(command.end(), small_.begin(), small_.end());
    }
    return command;
  }

  // Runs the command unless the file is there and no older than what it is made of. Commands give a
  // file its name only when it is complete, so a file that exists is complete.
  ExitCode make(const std::string& file, const std::string& source, const Words& command) {
    const bool old = fs::exists(file) && fs::exists(source) &&
                     fs::last_write_time(source) > fs::last_write_time(file);
    if (old) fs::remove(file);
    return fs::exists(file) ? ExitCode::kDone
                            : sbtrain(command, fs::path(file).filename().string());
  }

  ExitCode sbtrain(Words command, const std::string& log = "") {
    command.insert(command.begin(), fs::read_symlink("/proc/self/exe").string());
    const int status = run_program(command, log);
    if (status != 0 && signals_.stop_requested()) return ExitCode::kPreempted;
    return static_cast<ExitCode>(status);
  }

  // As start(), and shows the end of the log of a program that has failed.
  int run_program(const Words& words, const std::string& log) const {
    const int status = start(words, log);
    if (status == 0 || log.empty()) return status;
    for (const std::string& line : last_lines(log_path(log), 30)) fmt::print("      {}\n", line);
    fmt::print("      This is the end of {}.\n", log_path(log));
    return status;
  }

  static std::string log_path(const std::string& log) {
    return fmt::format("{}/{}.log", kLogs, log);
  }

  // The exit status of a program, or 128 + a signal's number. It writes to the terminal of this
  // one or, with the name of a log, there.
  int start(Words words, const std::string& log) const {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string path = log_path(log);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    if (!log.empty()) {
      ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, path.c_str(),
                                         O_WRONLY | O_CREAT | O_TRUNC, 0666);
      ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    }
    std::fflush(nullptr);
    pid_t child = -1;
    const int error = ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) {
      const std::string text = fmt::format("cannot run {}: {}\n", words[0], std::strerror(error));
      if (log.empty()) {
        fmt::print("      {}", text);
      } else {
        std::ofstream(path) << text;
      }
      return 127;
    }
    return wait_for(child, log.empty() ? "" : path);
  }

  int wait_for(pid_t child, const std::string& log) const {
    LatestLine latest(log);
    int status = 0;
    for (bool told = false; ::waitpid(child, &status, WNOHANG) == 0;) {
      if (signals_.stop_requested() && !told)
        ::kill(child, SIGTERM);  // Ctrl-C has reached it as well
      told = signals_.stop_requested();
      if (!log.empty()) latest.show();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  QuickstartOptions options_;
  fs::path files_;
  StopSignals signals_;
  Words small_;  // the files of the small text; empty if the text was fetched
  int step_ = 0;
  Stopwatch time_, step_time_;
  int data_seconds_ = 0, training_seconds_ = 0;
  bool drawn_ = false;
};

ExitCode run_quickstart(const QuickstartOptions& options) {
  const fs::path files = program_files();
  if (files.empty()) {
    fail(ExitCode::kUsage,
         "the files that come with sbtrain are not beside it: install it with pip, "
         "or with cmake --install");
  }
  std::error_code error;
  fs::create_directories(fs::path(options.folder) / kLogs, error);
  if (!error) fs::current_path(options.folder, error);
  if (error) fail(ExitCode::kStorage, "--folder {}: {}", options.folder, error.message());
  return Quickstart(options, files).run();
}

}  // namespace

void add_quickstart(Command app, Action& action) {
  Command command = app.add_subcommand(
      "quickstart", "Fetch text, train a small model on it and let it write, in minutes");
  auto options = std::make_shared<QuickstartOptions>();
  command.add_option("--folder", options->folder, "Where corpus/ and runs/ are made")
      .type_name("FOLDER")
      .capture_default_str();
  command.add_flag("--small-text", options->small_text,
                   "Take the text that comes with sbtrain, 0.4 MB, instead of fetching 45 MB");
  command
      .add_option("--steps", options->steps,
                  "Steps of training; default: 1200, of the small text 500")
      .check(whole_numbers(101, 1000000));  // more than the warmup
  command.callback([options, &action] { action = [options] { return run_quickstart(*options); }; });
}

}  // namespace sbtrain
