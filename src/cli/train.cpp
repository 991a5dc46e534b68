// sbtrain train: a training run, or with --dry-run its plan.
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>

#include "cli/backend.h"
#include "cli/choice_option.h"
#include "cli/cli.h"
#include "cli/job.h"
#include "cli/open_weights.h"
#include "cli/range.h"
#include "config/schema.h"
#include "core/gpus.h"
#include "core/version.h"
#include "parallel/agreement.h"
#include "parallel/supervisor.h"
#include "train/plan.h"
#include "train/rank_log.h"
#include "train/signals.h"
#include "train/trainer.h"

namespace sbtrain {

// What becomes of tensors that the weights of --init-from lack.
enum class MissingWeights : uint8_t { kRefuse, kInitialise };
template <>
inline constexpr auto kNames<MissingWeights> = enum_names<MissingWeights>(
    {{MissingWeights::kRefuse, "refuse"}, {MissingWeights::kInitialise, "initialise"}});

namespace {

struct TrainOptions {
  ConfigOptions config;
  std::string resume;
  std::string init_from;
  MissingWeights missing = MissingWeights::kRefuse;
  bool dry_run = false;
  DryRunOptions estimate;
};

Config load_config(const TrainOptions& options) {
  ConfigOptions selected = options.config;
  if (!options.resume.empty()) selected.overrides.push_back("checkpoint.resume=" + options.resume);
  return selected.load();
}

// The arguments with which a rank finds the same configuration.
std::vector<std::string> rank_arguments(const TrainOptions& options) {
  std::vector<std::string> arguments = {"train"};
  if (!options.config.path.empty()) arguments.push_back("--config=" + options.config.path);
  for (const std::string& assignment : options.config.overrides) {
    arguments.push_back("--set=" + assignment);
  }
  if (!options.resume.empty()) arguments.push_back("--resume=" + options.resume);
  if (!options.init_from.empty()) {
    arguments.push_back("--init-from=" + options.init_from);
    arguments.push_back(fmt::format("--init-from-missing={}", name_of(options.missing)));
  }
  return arguments;
}

InitFrom init_from(const TrainOptions& options) {
  return {.path = options.init_from,
          .initialise_missing = options.missing == MissingWeights::kInitialise,
          .open = open_weights};
}

ExitCode train_with(const ResolvedConfig& resolved, Backend backend, const Job& job,
                    const InitFrom& init) {
  try {
    return train(resolved, backend, job, init);
  } catch (const std::bad_alloc&) {
    fail(ExitCode::kOutOfMemory,
         "out of memory; a smaller train.micro_batch or train.recompute=full needs less");
  }
}

ResolvedConfig resolve(const Config& config) {
  return {.config = config, .yaml = config_yaml(config), .fields = flatten(config)};
}

// What must be the same on all ranks.
std::map<std::string, std::string> rank_fields(const ResolvedConfig& resolved, Backend backend,
                                               const InitFrom& init) {
  std::map<std::string, std::string> fields = resolved.fields;
  fields["(--init-from)"] = init.path;
  fields["(--init-from-missing)"] = init.initialise_missing ? "initialise" : "refuse";
  fields["(version)"] = version();
  fields["(git revision)"] = git_revision();
  fields["(backend)"] = backend_name(backend);
  if (backend == Backend::kCuda) fields["(GPU)"] = gpu_name(chosen_gpu());
  return fields;
}

ExitCode train_as_rank(const Config& config, const Job& job, const InitFrom& init) {
  ResolvedConfig resolved = resolve(config);
  open_rank_log(config.run_dir(), job.launch.rank);
  const Backend backend = select_backend(config.device);
  if (backend == Backend::kCuda) {
    check_gpus(config.train, job.launch);
    choose_gpu_of(job.launch);
  }
  spdlog::info("rank {} of {}, started by {}", job.launch.rank, job.launch.world,
               job.launch.launcher);
  agree(*job.control, rank_fields(resolved, backend, init));
  if (job.launch.rank > 0) resolved.config.metrics.progress = false;
  return train_with(resolved, backend, job, init);
}

// A rank of a launcher. It joins the others even if it has no valid configuration, so that the
// error is shown once and they do not wait.
ExitCode run_rank(const TrainOptions& options, const Launch& launch) {
  std::optional<Config> config;
  std::exception_ptr problem;
  Deadlines deadlines;
  try {
    config = load_config(options);
    deadlines.progress = std::chrono::milliseconds(std::llround(1000 * config->train.timeout));
  } catch (...) {
    problem = std::current_exception();
  }
  const Job job{.launch = launch, .control = make_control(launch, deadlines)};
  return run_in_job(*job.control, [&] {
    if (problem) std::rethrow_exception(problem);
    return train_as_rank(*config, job, init_from(options));
  });
}

ExitCode run_train(const TrainOptions& options) {
  if (options.dry_run) {
    release_stop_signals();
    const Config config = load_config(options);
    fmt::print("{}", describe_run(config, planned_backend(config.device), options.estimate));
    return ExitCode::kDone;
  }
  const Launch launch = find_launch(process_environment());
  if (launch.world > 1) {
    training_signals();  // takes those that arrive before the run can save
    return run_rank(options, launch);
  }
  const Config config = load_config(options);
  const Backend backend = select_backend(config.device);
  if (!launch.launcher.empty()) {
    check_gpus(config.train, launch);
  } else if (const int ranks = ranks_to_start(config.train, backend); ranks > 1) {
    return supervise({.arguments = rank_arguments(options), .ranks = ranks});
  }
  training_signals();
  return train_with(resolve(config), backend, Job{}, init_from(options));
}

// What --dry-run plans a run of many GPUs with.
void add_scale_options(CLI::App& command, DryRunOptions& options) {
  command
      .add_option("--world", options.world,
                  "With --dry-run: plan a run of so many GPUs: memory of a rank, collectives, "
                  "time of a step, the best sharding and micro-batch")
      ->check(CLI::Range(1, 1 << 16));
  command.add_option("--gpus-per-node", options.gpus_per_node, "GPUs of a node, for --world")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  const auto figure = [&](const char* name, double& value, const char* help) {
    command.add_option(name, value, help)->check(in_range(1e-3, 1e9))->capture_default_str();
  };
  figure("--nvlink-gbs", options.machine.nvlink_gbs,
         "GB/s that a ring carries inside a node, for --world (sbtrain bench collectives: bus)");
  figure("--network-gbs", options.machine.network_gbs,
         "GB/s of each GPU's network port, for --world");
  figure("--gpu-memory-gib", options.machine.memory_gib, "GiB of a GPU's memory, for --world");
  figure("--gpu-memory-gbs", options.machine.memory_gbs, "GB/s of a GPU's memory, for --world");
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train a model, or continue a run (the default)");
  command->add_option("--resume", options->resume,
                      "auto: continue the run in its folder, the default; last-good, or a step: go "
                      "back to that checkpoint; none: start over; or the path of a checkpoint "
                      "(short for --checkpoint.resume)");
  command->add_option("--init-from", options->init_from,
                      "Begin with the weights of a checkpoint, of a run's newest one, or of a "
                      "Hugging Face folder; data, schedule and step are the new run's own");
  add_choice(*command, "--init-from-missing", options->missing,
             "Tensors that these weights lack, such as those of another attention: refuse, or "
             "initialise; what the model lacks is then not used");
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
  add_scale_options(*command, options->estimate);
  options->config.add(*command, /*list_keys=*/true);
  command->callback([options, &action] { action = [options] { return run_train(*options); }; });
}

}  // namespace sbtrain
