// sbtrain quickstart: from nothing to a small trained model and a text that it wrote, with the
// files that come with the program. scripts/quickstart.sh does the same from a bare checkout, which
// it builds first.
//
// Each step is a command that is printed, so that it can be given again by hand. Steps whose result
// is there are skipped, and an interrupted training continues.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
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
    say_what_next();
    return ExitCode::kDone;
  }

 private:
  void announce(const std::string& what) {
    fmt::print("[{}/{}] {}\n", ++step_, kSteps, what);
    std::fflush(stdout);
  }

  ExitCode fetch() {
    announce("English text: documentation packages of the distribution, 45 MB");
    if (fs::exists(fs::path(kText) / "train")) return ExitCode::kDone;
    std::string why = "--small-text";
    if (!options_.small_text) {
      if (run_program({python_interpreter(), (files_ / "data/fetch_corpus.py").string(), "--small",
                       "--output", kText}) == 0) {
        return ExitCode::kDone;
      }
      if (signals_.stop_requested()) return ExitCode::kPreempted;
      why = "apt-get or the network is missing (above)";
    }
    small_ = small_text(files_);
    fmt::print("      {}: the documentation of sbtrain and Python is the text, 0.4 MB\n", why);
    return ExitCode::kDone;
  }

  ExitCode tokenizer() {
    announce("A tokenizer of 4096 pieces");
    return make(
        kTokenizer,
        with_input({"tokenizer", "train", "--vocab", "4096", "--output", kTokenizer}, "train"));
  }

  ExitCode tokens() {
    announce("The text as tokens");
    Words prepare = {"prepare", "--tokenizer", kTokenizer, "--output", kTrainData};
    if (!small_.empty()) {
      prepare.insert(prepare.end(), {"--split", "0.2"});
      const ExitCode code = make(kTrainData, with_input(prepare, ""));
      const fs::path held_out = "corpus/train.validation.h5";
      if (code == ExitCode::kDone && fs::exists(held_out)) fs::rename(held_out, kValidationData);
      return code;
    }
    const ExitCode code = make(kTrainData, with_input(prepare, "train"));
    if (code != ExitCode::kDone) return code;
    prepare[4] = kValidationData;
    return make(kValidationData, with_input(prepare, "validation"));
  }

  ExitCode train() {
    const int own = small_.empty() ? kTrainingSteps : kTrainingStepsOfSmallText;
    const int steps = options_.steps > 0 ? options_.steps : own;
    announce(fmt::format("The model of {}, {} steps; Ctrl-C saves and stops", kConfig, steps));
    return sbtrain(
        {"train", "--config", kConfig, fmt::format("--stages.0.length={} steps", steps)});
  }

  ExitCode generate() {
    announce("A text by the model");
    return sbtrain({"generate", "--checkpoint", kRun, "--prompt", "The kernel", "--max-tokens",
                    "120", "--temperature", "0.8", "--top-p", "0.95", "--seed", "1"});
  }

  static void say_what_next() {
    fmt::print(
        "\n\nThe model is in {}. You can try next, in this folder:\n\n"
        "  sbtrain generate --checkpoint {} --prompt \"The state\" --seed 2\n      another text\n"
        "  sbtrain serve --checkpoint {}\n      the model in a browser\n"
        "  sbtrain --config configs/tiny_rope.yaml\n"
        "      the same model with softmax attention and rotary positions\n"
        "  sbtrain train --config configs/1b_sb.yaml --dry-run\n"
        "      what a model of a billion parameters would need\n",
        kRun, kRun, kRun);
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

  // Commands give a file its name only when it is complete, so a file that exists is complete.
  ExitCode make(const std::string& file, const Words& command) {
    return fs::exists(file) ? ExitCode::kDone : sbtrain(command);
  }

  ExitCode sbtrain(Words command) {
    command.insert(command.begin(), fs::read_symlink("/proc/self/exe").string());
    const int status = run_program(command);
    if (status != 0 && signals_.stop_requested()) return ExitCode::kPreempted;
    return static_cast<ExitCode>(status);
  }

  // The exit status of a program that writes to the terminal of this one, or 128 + a signal's
  // number.
  int run_program(Words words) const {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    std::fflush(nullptr);
    pid_t child = -1;
    const int error = ::posix_spawnp(&child, argv[0], nullptr, nullptr, argv.data(), environ);
    if (error != 0) {
      fmt::print("      cannot run {}: {}\n", words[0], std::strerror(error));
      return 127;
    }
    int status = 0;
    for (bool told = false; ::waitpid(child, &status, WNOHANG) == 0;) {
      if (signals_.stop_requested() && !told)
        ::kill(child, SIGTERM);  // Ctrl-C has reached it as well
      told = signals_.stop_requested();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  QuickstartOptions options_;
  fs::path files_;
  StopSignals signals_;
  Words small_;  // the files of the small text; empty if the text was fetched
  int step_ = 0;
};

ExitCode run_quickstart(const QuickstartOptions& options) {
  const fs::path files = program_files();
  if (files.empty()) {
    fail(ExitCode::kUsage,
         "the files that come with sbtrain are not beside it: install it with pip, "
         "or with cmake --install");
  }
  std::error_code error;
  fs::create_directories(fs::path(options.folder) / "corpus", error);
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
                   "Take the text that comes with sbtrain, 0.4 MB, instead of fetching 25 MB");
  command
      .add_option("--steps", options->steps,
                  "Steps of training; default: 1200, of the small text 500")
      .check(whole_numbers(101, 1000000));  // more than the warmup
  command.callback([options, &action] { action = [options] { return run_quickstart(*options); }; });
}

}  // namespace sbtrain
