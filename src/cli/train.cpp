// sbtrain train: a training run, or with --dry-run its plan.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <optional>

#include "cli/backend.h"
#include "cli/cli.h"
#include "cli/open_weights.h"
#include "cli/ranks.h"
#include "config/schema.h"
#include "config/stored_config.h"
#include "core/gpus.h"
#include "core/log.h"
#include "core/version.h"
#include "job/agreement.h"
#include "train/batch_share.h"
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
  std::optional<double> mfu;          // machine.mfu
  std::optional<double> peak_tflops;  // metrics.peak_tflops
  std::string init_from;
  MissingWeights missing = MissingWeights::kRefuse;
  bool dry_run = false;
  DryRunOptions estimate;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(1000 * seconds));
}

Config load_config(const TrainOptions& options) {
  ConfigOptions selected = options.config;
  const auto set = [&](const char* option, const std::string& key, const auto& value) {
    for (const std::string& given : options.config.overrides) {
      if (!given.starts_with(key + "=")) continue;
      fail(ExitCode::kUsage, "--{} is short for --{}; give one of them", option, key);
    }
    selected.overrides.push_back(fmt::format("{}={}", key, value));
  };
  if (!options.resume.empty()) set("resume", "checkpoint.resume", options.resume);
  if (options.mfu) set("mfu", "machine.mfu", *options.mfu);
  if (options.peak_tflops) set("peak-tflops", "metrics.peak_tflops", *options.peak_tflops);
  return selected.load();
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
  return {.config = config,
          .yaml = config_yaml(config),
          .fields = flatten(config),
          .stored_fields = [](const CheckpointReader& checkpoint) {
            return flatten(stored_config(checkpoint));
          }};
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
  const Backend backend = select_rank_backend(config.device, job.launch);
  if (backend == Backend::kCuda) check_gpus(config.train, job.launch);
  log_info("rank {} of {}, started by {}", job.launch.rank, job.launch.world, job.launch.launcher);
  agree(*job.control, rank_fields(resolved, backend, init));
  check_batch(config.train, job.launch.world);
  if (job.launch.rank > 0) resolved.config.metrics.progress = false;
  return train_with(resolved, backend, job, init);
}

ExitCode train_alone(const Config& config, const Job& job, const InitFrom& init) {
  const Backend backend = select_backend(config.device);
  if (!job.launch.launcher.empty()) check_gpus(config.train, job.launch);
  training_signals();
  return train_with(resolve(config), backend, job, init);
}

ExitCode run_train(const TrainOptions& options) {
  if (options.dry_run) {
    release_stop_signals();
    const Config config = load_config(options);
    fmt::print("{}", describe_run(config, planned_backend(config.device), options.estimate));
    return ExitCode::kDone;
  }
  Config config;
  const InitFrom init = init_from(options);
  const auto prepare = [&](const Launch& launch) {
    if (launch.world > 1) training_signals();  // takes those that arrive before the run can save
    config = load_config(options);
    if (launch.world > 1) open_rank_log(config.run_dir(), launch.rank);
    return Deadlines{.rendezvous = milliseconds(config.train.rendezvous_timeout),
                     .progress = milliseconds(config.train.timeout),
                     .stopped = [] { return training_signals().stop_requested(); }};
  };
  return run_on_ranks(
      {.prepare = prepare,
       .shared_folder = [&]() -> std::filesystem::path { return config.run_dir(); },
       .ranks = [&] { return ranks_to_start(config.train, select_backend(config.device)); },
       .work =
           [&](const Job& job) {
             return job.launch.world > 1 ? train_as_rank(config, job, init)
                                         : train_alone(config, job, init);
           }});
}

// What --dry-run plans a run of many GPUs with.
void add_scale_options(Command command, DryRunOptions& options) {
  command
      .add_option("--world", options.world,
                  "Plan a run of so many GPUs: memory of a rank, collectives, "
                  "time of a step, the best sharding and micro-batch, on the machines of the "
                  "section machine of the configuration")
      .needs(command.get_option("--dry-run"))
      .check(whole_numbers(1, 1 << 16));
  command.add_option("--gpus-per-node", options.gpus_per_node, "GPUs of a node, for --world")
      .needs(command.get_option("--world"))
      .check(whole_numbers(1, 1024))
      .capture_default_str();
}

}  // namespace

void add_train(Command app, Action& action) {
  auto options = std::make_shared<TrainOptions>();
  Command command = app.add_subcommand("train", "Train a model, or continue a run (the default)");
  command.add_option("--resume", options->resume,
                     "auto: continue the run in its folder, the default; last-good, or a step: go "
                     "back to that checkpoint; none: start over; or the path of a checkpoint "
                     "(short for --checkpoint.resume)");
  command.add_option("--init-from", options->init_from,
                     "Begin with the weights of a checkpoint, of a run's newest one, or of a "
                     "Hugging Face folder; data, schedule and step are the new run's own");
  command
      .add_choice("--init-from-missing", options->missing,
                  "Tensors that these weights lack, such as those of another attention: refuse, or "
                  "initialise; what the model lacks is then not used")
      .needs(command.get_option("--init-from"));
  command.add_flag("--dry-run", options->dry_run,
                   "Print parameters, memory plan, FLOPs, schedule and estimated duration, and "
                   "stop; needs no GPU and no data");
  command
      .add_option("--mfu", options->mfu,
                  "Model FLOPs utilisation that --dry-run estimates times at (short for "
                  "--machine.mfu)")
      .check(in_range(0.001, 1.0));
  command
      .add_option("--peak-tflops", options->peak_tflops,
                  "Peak dense TFLOP/s of the device, for the estimate; default: 989 on a GPU, no "
                  "estimate on the CPU (short for --metrics.peak_tflops)")
      .check(in_range(1e-6, 1e9));
  add_scale_options(command, options->estimate);
  options->config.add(command, /*list_keys=*/true);
  command.callback([options, &action] { action = [options] { return run_train(*options); }; });
}

}  // namespace sbtrain
