// sbtrain sweep: many training runs, one on each GPU at a time, and a table of their results.
//
// Each run is a process of its own, so that the others continue whatever ends one. A stop signal is
// passed on to the runs, which save; the same command continues from there.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "cli/backend.h"
#include "cli/child_runs.h"
#include "cli/cli.h"
#include "cli/sweep_file.h"
#include "config/schema.h"
#include "core/error.h"
#include "core/gpus.h"
#include "core/log.h"
#include "core/sha256.h"
#include "job/launch.h"
#include "train/signals.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

struct SweepOptions {
  std::string file;
  std::string out;
  std::vector<std::string> overrides;
  int jobs = 0;  // 0: one for each GPU
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
    std::deque<size_t> waiting = prepare();
    ChildRuns children(slots());
    bool told = false;
    while (!children.empty() || (!waiting.empty() && !signals.stop_requested())) {
      if (!waiting.empty() && !children.full() && !signals.stop_requested()) {
        start(waiting.front(), children);
        waiting.pop_front();
        continue;
      }
      if (const std::optional<ChildRuns::Ended> ended = children.take_ended()) {
        record(*ended, signals.stop_requested());
        continue;
      }
      if (signals.stop_requested() && !told) {
        children.signal(SIGTERM);  // harmless if Ctrl-C has reached the children as well
        told = true;
      }
      if (signals.save_requested()) children.signal(SIGUSR2);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (signals.stop_requested()) {
      log_info("the sweep was stopped; the same command continues");
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
  // Loads every configuration, and returns the runs that are not complete.
  std::deque<size_t> prepare() {
    std::deque<size_t> waiting;
    for (size_t i = 0; i < runs_.size(); ++i) {
      SweepRun& run = runs_[i];
      Config& config = configs_.emplace_back();
      try {
        config = configuration(training_arguments(options_, file_, run));
      } catch (const Error& error) {
        run.status = "failed";
        run.exit_code = static_cast<int>(error.code());
        run.error = error.what();
        log_error("run {} of {}: {}: {}", i + 1, runs_.size(), run.name, error.what());
        continue;
      }
      run.error.clear();
      if (run.status == "done" && run.config_hash == hash_of(config)) continue;
      waiting.push_back(i);
    }
    write_results(file_, runs_);
    return waiting;
  }

  std::vector<ChildSlot> slots() const {
    const bool on_gpus = std::ranges::any_of(configs_, [](const Config& config) {
      return planned_backend(config.device) == Backend::kCuda;
    });
    const Environment variables = process_environment();
    const auto visible = variables.find("CUDA_VISIBLE_DEVICES");
    return make_slots(options_.jobs, on_gpus ? visible_gpus() : 0,
                      visible == variables.end() ? "" : visible->second,
                      static_cast<int>(std::thread::hardware_concurrency()));
  }

  // Where a run lies decides nothing: a sweep may be moved, and its results be taken elsewhere.
  static std::string hash_of(Config config) {
    config.out.clear();
    return sha256_hex(config_yaml(config));
  }

  fs::path folder_of(const SweepRun& run) const { return fs::path(file_.folder()) / run.name; }

  // The lines of several runs would mix on one terminal, so each then has a file.
  void start(size_t index, ChildRuns& children) {
    SweepRun& run = runs_[index];
    const fs::path log = children.slots() > 1 ? folder_of(run) / "output.log" : fs::path();
    log_info("run {} of {}: {}{}", index + 1, runs_.size(), run.name,
             log.empty() ? "" : fmt::format(" (its output: {})", log.string()));
    run.status = "running";
    run.config_hash = hash_of(configs_[index]);
    write_results(file_, runs_);
    std::vector<std::string> arguments = training_arguments(options_, file_, run);
    arguments.insert(arguments.begin(), "train");
    children.start(index, arguments, log);
  }

  void record(const ChildRuns::Ended& ended, bool stopping) {
    SweepRun& run = runs_[ended.id];
    run.seconds += ended.seconds;
    run.exit_code = ended.code;
    // A run that was stopped before it could save will continue from its last checkpoint.
    const bool stopped =
        ended.code == static_cast<int>(ExitCode::kPreempted) || (ended.code != 0 && stopping);
    run.status = ended.code == 0 ? "done" : stopped ? "interrupted" : "failed";
    read_result(folder_of(run) / "metrics.jsonl", run);
    run.epochs = epochs(configs_[ended.id], run.step);
    write_results(file_, runs_);
    if (run.status == "failed") {
      log_error("{}: failed with exit code {}; the other runs continue", run.name, ended.code);
    }
  }

  const SweepOptions& options_;
  const SweepFile file_;
  std::vector<SweepRun> runs_;
  std::vector<Config> configs_;  // of runs_; defaults where there is an error
};

// The runs would be ranks of one job, each started by every rank of the launcher.
void require_no_launcher() {
  const Launch launch = find_launch(process_environment());
  if (launch.world == 1) return;
  fail(ExitCode::kUsage,
       "{} has started {} ranks of this sweep, which starts its runs itself, on all GPUs of the "
       "machine: start it once",
       launch.launcher, launch.world);
}

ExitCode run_sweep(const SweepOptions& options) {
  SweepFile file = read_sweep(options.file);
  if (!options.out.empty()) file.out = options.out;
  Sweep sweep(options, std::move(file));
  if (options.list) {
    sweep.list();
    return ExitCode::kDone;
  }
  require_no_launcher();
  const ExitCode code = sweep.train();
  sweep.print(options.all);
  if (code != ExitCode::kDone || sweep.failure() == 0) return code;
  log_error("not every run succeeded; the same command tries the failed ones again");
  return static_cast<ExitCode>(sweep.failure());
}

}  // namespace

void add_sweep(Command app, Action& action) {
  auto options = std::make_shared<SweepOptions>();
  Command command =
      app.add_subcommand("sweep", "Train the runs of a sweep and tabulate their results");
  command.add_option("file", options->file, "YAML file of the sweep (docs/tasks.md)")
      .type_name("FILE")
      .required();
  command.add_option("--out", options->out, "Folder of the runs; default: the file's");
  command.add_option("--set", options->overrides, "Set one key of all runs, as --train.batch=32")
      .type_name("KEY=VALUE")
      .allow_extra_args(false);
  command
      .add_option("--jobs", options->jobs,
                  "Runs at a time, which share the machine's GPUs evenly, several on each if there "
                  "are more runs than GPUs; default: one for each GPU, one on the CPU")
      .check(whole_numbers(1, 1024));
  command.add_flag("--list", options->list, "Print the command of each run, and stop");
  command.add_flag("--all", options->all,
                   "Tabulate every run, not only the best over the keys of best_over");
  command.callback([options, &action] { action = [options] { return run_sweep(*options); }; });
}

}  // namespace sbtrain
