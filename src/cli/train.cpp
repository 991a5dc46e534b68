// sbtrain train: a training run, or with --dry-run its plan.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <new>

#include "cli/backend.h"
#include "cli/cli.h"
#include "cli/range.h"
#include "config/schema.h"
#include "train/plan.h"
#include "train/trainer.h"

namespace sbtrain {
namespace {

struct TrainOptions {
  ConfigOptions config;
  std::string resume;
  bool dry_run = false;
  DryRunOptions estimate;
};

ExitCode run_train(const TrainOptions& options) {
  ConfigOptions selected = options.config;
  if (!options.resume.empty()) selected.overrides.push_back("checkpoint.resume=" + options.resume);
  const Config config = selected.load();
  if (options.dry_run) {
    fmt::print("{}", describe_run(config, planned_backend(config.device), options.estimate));
    return ExitCode::kDone;
  }
  const Backend backend = select_backend(config.device);
  try {
    return train({.config = config, .yaml = config_yaml(config), .fields = flatten(config)},
                 backend);
  } catch (const std::bad_alloc&) {
    fail(ExitCode::kOutOfMemory,
         "out of memory; a smaller train.micro_batch or train.recompute=full needs less");
  }
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a model, or continue a run (the default)");
  command->add_option("--resume", options->resume,
                      "auto: continue the run in its folder, the default; none: start over; or "
                      "the path of a checkpoint (short for --checkpoint.resume)");
  command->add_flag("--dry-run", options->dry_run,
                    "Print parameters, memory plan, FLOPs, schedule and estimated duration, and "
                    "stop; needs no GPU and no data");
  command
      ->add_option("--mfu", options->estimate.mfu,
                   "Model FLOPs utilisation that --dry-run estimates the duration at")
      ->check(in_range(0.001, 1.0))
      ->capture_default_str();
  command
      ->add_option("--peak-tflops", options->estimate.peak_tflops,
                   "Peak dense TFLOP/s of the device, for the estimate; default: 989 on a GPU, no "
                   "estimate on the CPU")
      ->check(in_range(1e-6, 1e9));
  options->config.add(*command, /*list_keys=*/true);
  command->callback([options, &action] { action = [options] { return run_train(*options); }; });
}

}  // namespace sbtrain
