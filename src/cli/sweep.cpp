// sbtrain sweep: many training runs, one after the other, and a table of their results.
//
// Each run is a process of its own, so that the others continue whatever ends one. A stop signal is
// passed on to the run, which saves; the same command continues from there.
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "cli/cli.h"
#include "cli/sweep_file.h"
#include "config/schema.h"
#include "core/sha256.h"
#include "train/signals.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

struct SweepOptions {
  std::string file;
  std::string out;
  std::vector<std::string> overrides;
  bool list = false;
  bool all = false;
};

// The arguments of `sbtrain train` for one run; "train" itself is left out.
std::vector<std::string> training_arguments(const SweepOptions& options, const SweepFile& sweep,
                                            const SweepRun& run) {
  std::vector<std::string> arguments = {"--config", run.config};
  const auto set = [&](const std::string& key, const std::string& value) {
    arguments.push_back(fmt::format("--set={}={}", key, value));
  };
  set("name", fs::path(run.name).filename());
  for (const auto& [key, value] : run.set) set(key, value);
  for (const auto& [key, value] : run.grid) set(key, value);
  for (const std::string& assignment : options.overrides) {
    arguments.push_back("--set=" + assignment);
  }
  set("out", (fs::path(sweep.folder()) / run.name).string());
  return arguments;
}

// The configuration that these arguments give.
Config configuration(const std::vector<std::string>& arguments) {
  ConfigOptions options;
  options.path = arguments[1];
  for (size_t i = 2; i < arguments.size(); ++i) {
    options.overrides.push_back(arguments[i].substr(std::strlen("--set=")));
  }
  return options.load();
}

std::string shell_line(const std::vector<std::string>& arguments) {
  std::string line = "sbtrain train";
  for (const std::string& argument : arguments) {
    const bool plain = argument.find_first_of(" '\"[]{}$*?&|;<>()") == std::string::npos;
    line += plain ? " " + argument : fmt::format(" '{}'", argument);
  }
  return line;
}

// Starts this program with `argv`. However the sweep ends, the kernel then asks the child to stop,
// so that it saves and does not train on unseen.
pid_t start_child(char* const* argv) {
  const pid_t parent = getpid();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) {
    fail(ExitCode::kOutOfMemory, "cannot start a training run: {}", std::strerror(errno));
  }
  if (child > 0) return child;
  // Only calls that are safe between fork and exec.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(static_cast<int>(ExitCode::kPreempted));
  execv("/proc/self/exe", argv);
  _exit(static_cast<int>(ExitCode::kInternal));
}

// Runs `sbtrain train ARGUMENTS` and returns its exit code, 128 + n after signal n. Requests to
// stop or to save are passed on.
int run_child(const std::vector<std::string>& arguments, StopSignals& signals) {
  std::vector<std::string> words = {"sbtrain", "train"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = start_child(argv.data());
  bool told = false;
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (signals.stop_requested() && !told) {
      kill(child, SIGTERM);  // harmless if Ctrl-C has reached the child as well
      told = true;
    }
    if (signals.save_requested()) kill(child, SIGUSR2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::optional<double> epochs(const Config& config, int64_t step) {
  if (!config.data.task.active()) return std::nullopt;
  return static_cast<double>(step * config.train.batch) /
         static_cast<double>(config.data.task.examples);
}

class Sweep {
 public:
  Sweep(const SweepOptions& options, SweepFile file)
      : options_(options), file_(std::move(file)), runs_(expand(file_)) {
    restore_results(file_, runs_);
  }

  void list() const {
    for (const SweepRun& run : runs_) {
      fmt::print("{}\n", shell_line(training_arguments(options_, file_, run)));
    }
  }

  ExitCode train() {
    StopSignals signals;
    for (size_t i = 0; i < runs_.size() && !signals.stop_requested(); ++i) {
      train_one(runs_[i], i, signals);
      write_results(file_, runs_);
    }
    if (signals.stop_requested()) {
      spdlog::info("the sweep was stopped; the same command continues");
      return ExitCode::kPreempted;
    }
    return ExitCode::kDone;
  }

  void print(bool all) const {
    std::vector<const SweepRun*> shown = best_runs(file_, runs_);
    if (all) {
      shown.clear();
      for (const SweepRun& run : runs_) shown.push_back(&run);
    }
    fmt::print("{}", results_table(file_, shown));
    for (const SweepRun& run : runs_) {
      if (!run.error.empty()) fmt::print("{}: {}\n", run.name, run.error);
    }
    fmt::print("{}\n", (fs::path(file_.folder()) / "sweep.json").string());
  }

  // The exit code of the first run that failed, or 0.
  int64_t failure() const {
    const auto failed = std::ranges::find(runs_, "failed", &SweepRun::status);
    return failed == runs_.end() ? 0 : failed->exit_code;
  }

 private:
  void train_one(SweepRun& run, size_t index, StopSignals& signals) {
    const std::vector<std::string> arguments = training_arguments(options_, file_, run);
    std::string hash;
    Config config;
    try {
      config = configuration(arguments);
      hash = sha256_hex(config_yaml(config));
    } catch (const Error& error) {
      run.status = "failed";
      run.exit_code = static_cast<int>(error.code());
      run.error = error.what();
      spdlog::error("run {} of {}: {}: {}", index + 1, runs_.size(), run.name, error.what());
      return;
    }
    run.error.clear();
    if (run.status == "done" && run.config_hash == hash) return;
    spdlog::info("run {} of {}: {}", index + 1, runs_.size(), run.name);
    run.status = "running";
    run.config_hash = hash;
    write_results(file_, runs_);
    const auto start = std::chrono::steady_clock::now();
    const int code = run_child(arguments, signals);
    run.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    run.exit_code = code;
    // A run that was stopped before it could save will continue from its last checkpoint.
    const bool stopped =
        code == static_cast<int>(ExitCode::kPreempted) || (code != 0 && signals.stop_requested());
    run.status = code == 0 ? "done" : stopped ? "interrupted" : "failed";
    read_result(fs::path(file_.folder()) / run.name / "metrics.jsonl", run);
    run.epochs = epochs(config, run.step);
    if (run.status == "failed") {
      spdlog::error("{}: failed with exit code {}; the other runs continue", run.name, code);
    }
  }

  const SweepOptions& options_;
  const SweepFile file_;
  std::vector<SweepRun> runs_;
};

ExitCode run_sweep(const SweepOptions& options) {
  SweepFile file = read_sweep(options.file);
  if (!options.out.empty()) file.out = options.out;
  Sweep sweep(options, std::move(file));
  if (options.list) {
    sweep.list();
    return ExitCode::kDone;
  }
  const ExitCode code = sweep.train();
  sweep.print(options.all);
  if (code != ExitCode::kDone || sweep.failure() == 0) return code;
  spdlog::error("not every run succeeded; the same command tries the failed ones again");
  return static_cast<ExitCode>(sweep.failure());
}

}  // namespace

void add_sweep(CLI::App& app, Action& action) {
  auto options = std::make_shared<SweepOptions>();
  CLI::App* command =
      app.add_subcommand("sweep", "Train the runs of a sweep and tabulate their results");
  command->add_option("file", options->file, "YAML file of the sweep (docs/tasks.md)")
      ->type_name("FILE")
      ->required();
  command->add_option("--out", options->out, "Folder of the runs; default: the file's");
  command->add_option("--set", options->overrides, "Set one key of all runs, as --train.batch=32")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  command->add_flag("--list", options->list, "Print the command of each run, and stop");
  command->add_flag("--all", options->all,
                    "Tabulate every run, not only the best over the keys of best_over");
  command->callback([options, &action] { action = [options] { return run_sweep(*options); }; });
}

}  // namespace sbtrain
