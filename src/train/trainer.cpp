#include "train/trainer.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/model_state.h"
#include "checkpoint/run_lock.h"
#include "core/files.h"
#include "core/version.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "eval/perplexity.h"
#include "eval/task_accuracy.h"
#include "model/transformer.h"
#include "optim/schedule.h"
#include "parallel/communicator.h"
#include "train/guard.h"
#include "train/metrics.h"
#include "train/plan.h"
#include "train/run_state.h"
#include "train/signals.h"
#include "train/step.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

constexpr const char* kConfigFile = "config.yaml";
constexpr const char* kInfoFile = "run.json";

std::string text_of(const fs::path& file) {
  std::error_code unreadable;
  return fs::exists(file, unreadable) ? read_input(file, ExitCode::kStorage) : "";
}

// A folder that no run has used may hold a configuration that a user wrote, perhaps the one that
// this run has read. The resolved configuration must not replace it.
void check_run_folder(const fs::path& run, const std::string& config_yaml) {
  const fs::path config = run / kConfigFile;
  if (fs::exists(run / kInfoFile) || !fs::exists(config)) return;
  if (text_of(config) == config_yaml) return;
  fail(ExitCode::kUsage,
       "{} was not written by a run, and the resolved configuration would replace it: keep it "
       "outside of the run folder, or choose another folder (out)",
       config.string());
}

// Writes a file of the run folder. A file of an earlier start that differs is kept under another
// name.
void write_run_file(const fs::path& file, const std::string& text) {
  const std::string before = text_of(file);
  if (before == text) return;
  if (!before.empty()) {
    spdlog::info("{} differs from that of an earlier start, which is kept as {}", file.string(),
                 set_aside(file).string());
  }
  replace_file(file, text);
}

// Records the configuration, the machine, the program and the tokenizer, so that the model can be
// used with the run folder only.
void describe_run_folder(const fs::path& run, const std::string& config_yaml,
                         const std::string& tokenizer) {
  const nlohmann::json info = {{"version", version()},
                               {"git_revision", git_revision()},
                               {"host", host_name()},
                               {"started", std::chrono::duration_cast<std::chrono::seconds>(
                                               std::chrono::system_clock::now().time_since_epoch())
                                               .count()}};
  replace_file(run / kInfoFile, info.dump(2) + "\n");
  write_run_file(run / kConfigFile, config_yaml);
  if (!tokenizer.empty()) {
    write_run_file(run / kRunTokenizer, read_input(tokenizer, ExitCode::kData));
  }
}

// Everything that a run holds while it trains.
class Run {
 public:
  Run(const ResolvedConfig& resolved, Backend backend);
  ExitCode train();

 private:
  bool resume();
  void tune();
  void open_stage(int stage);
  void train_one_step();
  void settle();
  void validate();
  ValidationMetrics validate_text();
  ValidationMetrics validate_task();
  void save();
  bool due(const Duration& every) const;
  bool finished() const { return state_.stopped || state_.step >= schedule_.total_steps(); }

  const ResolvedConfig& resolved_;
  const Config& config_;
  const fs::path folder_;
  const RunLock lock_;
  const Schedule schedule_;
  const Transformer model_;
  std::unique_ptr<Communicator> communicator_;
  Memory memory_;
  Stream stream_;
  TrainStep step_;
  RunState state_;
  bool resumed_ = false;
  int stage_ = -1;
  std::unique_ptr<Loader> loader_;
  HeldOut held_out_;
  std::optional<Task> task_;
  std::optional<CheckpointWriter> writer_;
  std::optional<Metrics> metrics_;
  std::optional<Guard> guard_;
  int64_t saved_step_ = -1;
  int64_t validated_step_ = -1;

  // The step that the device may still be working on. Its result is read one step late, so that
  // the device never waits for the host.
  struct Enqueued {
    PendingStep pending;
    int64_t step = 0;
    double lr = 0;
  };
  std::optional<Enqueued> enqueued_;
};

// The memory of the whole step is planned, then allocated once.
Memory& with_plan(Memory& memory, const Config& config, const Transformer& model,
                  Communicator& communicator) {
  Memory plan = Memory::planning(memory.backend());
  Stream stream(plan);
  TrainStep step(config, model, stream, communicator);
  step.plan();
  memory.adopt_plan(plan);
  return memory;
}

// The tokenizer of all the text that the run trains on, in all stages; empty for tasks. Opens every
// store, so that a missing one is found now and not when its stage begins.
std::string training_tokenizer(const Config& config) {
  if (config.data.task.active()) return "";
  std::vector<SourceConfig> sources;
  for (const StageConfig& stage : config.stages) {
    const auto& own = stage.sources.empty() ? config.data.sources : stage.sources;
    sources.insert(sources.end(), own.begin(), own.end());
  }
  std::string hash = common_tokenizer(sources);
  if (!hash.empty() && !config.data.tokenizer.empty() &&
      Tokenizer(config.data.tokenizer).hash() != hash) {
    fail(ExitCode::kConfig, "data.tokenizer: {} is not what {} was prepared with",
         config.data.tokenizer, sources.front().path);
  }
  return hash;
}

HeldOutOptions held_out(const Config& config) {
  return {.paths = config.data.validation,
          .tokenizer = config.data.tokenizer,
          .tokenizer_hash = training_tokenizer(config),
          .vocab = config.model.vocab,
          .sequence_length = config.train.sequence_length,
          .micro_batch = config.train.micro_batch,
          .max_tokens = config.validation.tokens,
          .predict_across_documents = config.data.predict_across_documents};
}

Run::Run(const ResolvedConfig& resolved, Backend backend)
    : resolved_(resolved),
      config_(resolved.config),
      folder_(config_.run_dir()),
      lock_(folder_),
      schedule_(config_.stages, config_.train.lr, config_.train.batch,
                config_.train.tokens_per_step()),
      model_(config_.model, config_.train.recompute),
      communicator_(make_single_process()),
      memory_(backend),
      stream_(with_plan(memory_, config_, model_, *communicator_)),
      step_(config_, model_, stream_, *communicator_),
      held_out_(held_out(config_)) {
  if (config_.data.task.active()) {
    task_.emplace(config_.data.task, config_.model.vocab, config_.train.sequence_length,
                  config_.seed);
  }
  check_run_folder(folder_, resolved.yaml);
  resumed_ = resume();
  if (!resumed_) step_.params().initialize(config_.seed);
  if (backend == Backend::kCuda) tune();
  if (!finished()) describe_run_folder(folder_, resolved.yaml, config_.data.tokenizer);
  guard_.emplace(config_.train.max_bad_steps, state_.guard);
  writer_.emplace(CheckpointWriter::Options{.run = folder_,
                                            .keep = config_.checkpoint.keep,
                                            .max_failures = config_.checkpoint.max_failures,
                                            .async = config_.checkpoint.async});
  MetricsOptions metrics;
  metrics.run_dir = folder_.string();
  metrics.config = config_.metrics;
  metrics.total_steps = schedule_.total_steps();
  metrics.tokens_per_step = config_.train.tokens_per_step();
  metrics.flops_per_token =
      model_.flops_per_token(static_cast<double>(config_.train.sequence_length) / 2);
  metrics.peak_flops = config_.metrics.peak_tflops * 1e12;
  if (resumed_) metrics.resumed_step = state_.step;
  metrics_.emplace(metrics);
}

// The choices of algorithms belong to the run: with others, a resumed run would round differently.
void Run::tune() {
  const fs::path file = folder_ / "gemm.txt";
  const std::string known = text_of(file);
  const std::string choices = step_.tune(known);
  if (choices != known) replace_file(file, choices);
}

bool Run::resume() {
  const std::optional<CheckpointReader> checkpoint =
      resume_checkpoint(folder_, config_.checkpoint.resume);
  if (!checkpoint) return false;
  const std::string name = checkpoint->folder().string();
  check_identity(checkpoint->manifest().fingerprints, identity_fields(resolved_.fields),
                 config_.checkpoint.allow_changes, name);
  state_ = parse_run_state(checkpoint->state_json(), name + "/state.json");
  load_params(*checkpoint, step_.params(), /*with_moments=*/true);
  step_.set_updates(state_.updates);
  saved_step_ = state_.step;
  spdlog::info("resumed from {} (step {}, {} tokens)", name, state_.step, state_.tokens);
  return true;
}

// Opens the loader of a stage, which continues each source where the stages before have stopped.
void Run::open_stage(int stage) {
  std::optional<LoaderState> state;
  if (loader_) {
    state = loader_->state();
  } else if (!state_.loader.empty()) {
    state = LoaderState::from_json(state_.loader);
  }
  loader_ = nullptr;
  const std::vector<SourceConfig>& sources = config_.stages[stage].sources;
  LoaderOptions options;
  options.sources = sources.empty() ? config_.data.sources : sources;
  options.task = config_.data.task;
  options.task_vocab = config_.model.vocab;
  options.packing = config_.data.packing;
  options.predict_across_documents = config_.data.predict_across_documents;
  options.sequence_length = config_.train.sequence_length;
  options.micro_batch = config_.train.micro_batch;
  options.batch = config_.train.batch;
  options.seed = config_.seed;
  options.rank = communicator_->rank();
  options.world = communicator_->world();
  options.stage = stage;
  options.prefetch = config_.data.prefetch;
  options.accept_changes = config_.checkpoint.allow_changes;
  loader_ = std::make_unique<Loader>(options, state ? &*state : nullptr);
  if (loader_->vocab() > config_.model.vocab) {
    fail(ExitCode::kConfig, "{} has a vocabulary of {}, the model of {}: set model.vocab to it",
         options.sources.front().path, loader_->vocab(), config_.model.vocab);
  }
  stage_ = stage;
}

void Run::train_one_step() {
  const int stage = schedule_.stage(state_.step);
  if (stage != stage_) open_stage(stage);
  std::vector<PackedBatch> micro_batches;
  for (int64_t n = 0; n < loader_->micro_batches_per_step(); ++n) {
    micro_batches.push_back(loader_->next());
  }
  const double lr = schedule_.lr(state_.step);
  PendingStep pending = step_.run(micro_batches, lr);
  settle();
  state_.step += 1;
  state_.tokens += config_.train.tokens_per_step();
  enqueued_ = {.pending = std::move(pending), .step = state_.step, .lr = lr};
}

// Waits for the enqueued step and records its result; its weights are in place afterwards.
void Run::settle() {
  if (!enqueued_) return;
  const StepResult result = enqueued_->pending.wait();
  // A step that the guard does not accept has changed nothing on the device either.
  guard_->accept(enqueued_->step, result.loss, result.grad_norm * result.grad_norm, enqueued_->lr);
  state_.updates = result.updates;
  state_.guard = guard_->state();
  metrics_->train_step({.step = enqueued_->step,
                        .loss = result.loss,
                        .lr = enqueued_->lr,
                        .grad_norm = result.grad_norm,
                        .skipped_steps = state_.guard.skipped,
                        .stage = schedule_.stage(enqueued_->step - 1)});
  enqueued_.reset();
}

ValidationMetrics Run::validate_text() {
  const Perplexity result =
      held_out_.evaluate([&](const PackedBatch& batch) { return step_.evaluate(batch).loss_sum; });
  return {.loss = result.loss(), .tokens = result.tokens, .bytes = result.bytes};
}

ValidationMetrics Run::validate_task() {
  const TaskAccuracy result =
      task_accuracy(*task_, config_.train.micro_batch,
                    [&](const PackedBatch& batch) { return step_.evaluate(batch); });
  return {.loss = result.loss(), .tokens = result.labels, .accuracy = result.accuracy()};
}

void Run::validate() {
  if ((!task_ && held_out_.empty()) || validated_step_ == state_.step) return;
  settle();
  const MetricsPause pause(*metrics_);
  const ValidationMetrics result = task_ ? validate_task() : validate_text();
  metrics_->validation(state_.step, result);
  validated_step_ = state_.step;
  const double enough = config_.validation.stop_accuracy;
  if (enough > 0 && result.accuracy >= enough && !finished()) {
    spdlog::info("step {}: accuracy {:.4f}, so the run ends here (validation.stop_accuracy {})",
                 state_.step, *result.accuracy, enough);
    state_.stopped = true;
  }
}

// Training waits only for the copy of the state; the writer does the rest.
void Run::save() {
  settle();
  if (saved_step_ == state_.step) return;
  const MetricsPause pause(*metrics_);
  if (loader_) state_.loader = loader_->state().to_json();
  Snapshot snapshot = writer_->take_buffers();
  take_snapshot(step_.params(), snapshot);
  snapshot.step = state_.step;
  snapshot.tokens = state_.tokens;
  snapshot.state_json = format_run_state(state_);
  snapshot.config_yaml = resolved_.yaml;
  snapshot.fingerprints = identity_fields(resolved_.fields);
  metrics_->flush();
  writer_->save(std::move(snapshot));
  saved_step_ = state_.step;
}

bool Run::due(const Duration& every) const {
  const int64_t steps = every.steps(config_.train.tokens_per_step());
  return steps > 0 && state_.step % steps == 0;
}

ExitCode Run::train() {
  if (finished()) {
    spdlog::info("{} is complete: {} steps. Give it a longer stage, or another --out, to train on.",
                 folder_.string(), state_.step);
    return ExitCode::kDone;
  }
  // Kept until the process ends: a signal that arrives while the run ends must not kill it.
  static StopSignals& signals = *new StopSignals;
  if (!resumed_) validate();
  while (!finished() && !signals.stop_requested()) {
    train_one_step();
    writer_->poll();
    if (due(config_.validation.every)) validate();
    const bool asked = signals.save_requested();
    if (asked || due(config_.checkpoint.every)) save();
  }
  if (finished()) validate();
  save();
  if (!writer_->wait() && saved_step_ == state_.step) {
    fail(ExitCode::kStorage, "the last checkpoint could not be saved: {}", writer_->last().error);
  }
  if (finished()) return ExitCode::kDone;
  spdlog::info("stopped by signal {} after step {}, saved; the same command continues",
               signals.signal(), state_.step);
  return ExitCode::kPreempted;
}

}  // namespace

ExitCode train(const ResolvedConfig& resolved, Backend backend) {
  return Run(resolved, backend).train();
}

}  // namespace sbtrain
