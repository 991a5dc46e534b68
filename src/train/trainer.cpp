#include "train/trainer.h"

#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "checkpoint/model_state.h"
#include "checkpoint/run_lock.h"
#include "core/device.h"
#include "core/files.h"
#include "core/host_memory.h"
#include "core/log.h"
#include "core/memory_check.h"
#include "data/loader.h"
#include "job/agreement.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "ops/stream_control.h"
#include "optim/schedule.h"
#include "parallel/make_communicator.h"
#include "train/communicator_options.h"
#include "train/engines.h"
#include "train/guard.h"
#include "train/host_share.h"
#include "train/metrics.h"
#include "train/plan.h"
#include "train/precision_choice.h"
#include "train/run_data.h"
#include "train/run_folder.h"
#include "train/run_state.h"
#include "train/saver.h"
#include "train/signals.h"
#include "train/start_order.h"
#include "train/start_times.h"
#include "train/step.h"
#include "train/validation.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

// What loading, tuning, opening data or saving may take, beyond the deadline for a step.
constexpr std::chrono::minutes kLongPhase{60};

// Everything that a run holds while it trains. The constructor takes the run's folder, joins the
// ranks and allocates the planned memory; prepare() does the rest of what comes before the first
// step, and train() what comes from there on.
class Run {
 public:
  Run(const ResolvedConfig& resolved, Backend backend, const Job& job, StopSignals& signals);
  void prepare(const InitFrom& init);
  ExitCode train();
  // Says in the run folder how the start has ended.
  void ended(ExitCode code, const std::string& message = {});
  // A run that has failed by itself is not continued by the same order.
  void forget_order() const {
    if (leads()) order_.forget();
  }

 private:
  Precision chosen_precision(Backend backend);
  void load(const InitFrom& init);
  bool resume();
  void weights_there(const char* phase);
  void begin(const InitFrom& init);
  void check_rate(const std::string& checkpoint) const;
  void describe_new_state(const std::string& checkpoint, const std::string& optimizer,
                          std::set<std::string> anew) const;
  void tune();
  void tune_products();
  void describe_folder();
  void open_saver();
  void open_metrics();
  void open_stage(int stage);
  void train_one_step();
  void settle();
  double end_of_step(bool was_done);
  Requests take_requests();
  void note(const Requests& requests);
  void validate();
  void save();
  void save_when_due();
  ExitCode finish();
  bool due(const Duration& every) const;
  bool finished() const { return state_.stopped || state_.step >= schedule_.total_steps(); }

  // With other ranks, what this one is asked for counts when it comes back from a reduction, so
  // that all ranks act on it at the same place. Alone, it counts at once.
  bool alone() const { return control_.world() == 1; }
  bool leads() const { return control_.rank() == 0; }

  StartTimes start_;
  const ResolvedConfig& resolved_;
  Config config_;  // with the engines and the precision that `auto` stands for
  Control& control_;
  const int node_;
  StopSignals& signals_;
  const fs::path folder_;
  const std::optional<RunLock> lock_;  // of rank 0, on behalf of all
  const Schedule schedule_;
  std::unique_ptr<Communicator> communicator_;
  const Mesh mesh_;
  const Transformer model_;
  [[maybe_unused]] const Precision precision_;  // chosen before anything takes memory
  Memory memory_;
  Stream stream_;
  TrainStep step_;
  RunState state_;
  bool resumed_ = false;
  int stage_ = -1;
  std::unique_ptr<Loader> loader_;
  std::optional<Validation> validation_;
  std::optional<Metrics> metrics_;
  std::optional<Saver> saver_;  // may flush metrics_ until it is gone
  std::optional<Guard> guard_;
  bool described_ = false;  // this start's files are in the folder
  SavedState continued_;    // the checkpoint of this run that it continues
  StartOrder order_;
  Requests requests_;  // of any rank, not yet acted on

  // The step that the device may still be working on. Its result is read one step late, so that
  // a GPU never waits for the host.
  struct Enqueued {
    PendingStep pending;
    int64_t step = 0;
    double lr = 0;
    double launched = 0;  // when the device had all of it, in Metrics::seconds()
  };
  std::optional<Enqueued> enqueued_;
  double ended_ = 0;  // the last step that has been settled, in Metrics::seconds()
};

// The memory of the whole step is planned, then allocated once.
Memory& with_plan(Memory& memory, const Config& config, const Transformer& model, const Mesh& mesh,
                  const Job& job, StartTimes& start) {
  Memory plan = Memory::planning(memory.backend());
  Stream stream(plan);
  TrainStep step(config, model, stream, mesh);
  step.plan();
  start.done("plan");
  const size_t host = step.host_bytes();
  if (memory.backend() == Backend::kCpu) {
    require_shared_memory(*job.control, job.launch.node, plan.report().total_bytes() + host,
                          "the run");
  } else if (host > 0) {
    require_shared_memory(*job.control, job.launch.node, host, "train.offload");
  }
  log_info("memory of {}: {}{}", mesh.world().world() > 1 ? "each rank" : "the run",
           summarize_memory(plan.report(), library_memory(memory.backend(), mesh.world().world())),
           host > 0 ? fmt::format(", and {:.2f} GiB of the host", gibibytes(host)) : "");
  prepare_memory(memory, communicator_options(config.train), mesh.world().world());
  memory.adopt_plan(plan);
  start.done("memory");
  return memory;
}

Config with_engines(const Config& config, const Job& job, Backend backend) {
  Config mine = config;
  mine.train = with_engines(config.train, *job.control, job.launch, backend);
  return mine;
}

std::optional<RunLock> lock_run(const fs::path& folder, const Control& control) {
  if (control.rank() != 0) return std::nullopt;
  return RunLock(folder);
}

Run::Run(const ResolvedConfig& resolved, Backend backend, const Job& job, StopSignals& signals)
    : resolved_(resolved),
      config_(with_engines(resolved.config, job, backend)),
      control_(*job.control),
      node_(job.launch.node),
      signals_(signals),
      folder_(config_.run_dir()),
      lock_(lock_run(folder_, control_)),
      schedule_(schedule_of(config_)),
      communicator_(make_communicator(control_, backend, communicator_options(config_.train))),
      mesh_(*communicator_, config_.train.sharding, job.launch.local_world,
            static_cast<int>(config_.train.context_parallel)),
      model_(config_.model, config_.train.recompute, mesh_.shard_count()),
      precision_(chosen_precision(backend)),
      memory_(backend),
      stream_(with_plan(memory_, config_, model_, mesh_, job, start_)),
      step_(config_, model_, stream_, mesh_),
      order_(folder_, config_.checkpoint.resume, resolved.yaml) {
  ops::control(stream_).check_after_waits([this] { control_.check(); });
}

void Run::prepare(const InitFrom& init) {
  validation_.emplace(config_, mesh_);
  start_.done("data");
  if (leads()) check_run_folder(folder_, resolved_.yaml);
  load(init);
  tune();
  if (leads() && !finished()) describe_folder();
  guard_.emplace(config_.train.max_bad_steps, state_.guard);
  open_saver();
  open_metrics();
}

// Sets config_ too, which the plan and the step follow.
Precision Run::chosen_precision(Backend backend) {
  if (config_.train.precision != Precision::kAuto) return config_.train.precision;
  control_.progress("timing bf16 and fp8", kLongPhase);
  const PrecisionChoice choice =
      keep_precision(config_, backend, *communicator_, folder_ / "precision.json", leads());
  if (leads())
    log_info("train.precision: auto is {}: {}", name_of(choice.precision), choice.reason);
  config_.train.precision = choice.precision;
  return choice.precision;
}

// The weights and the data, from a checkpoint or from their beginning.
void Run::load(const InitFrom& init) {
  control_.progress("loading", kLongPhase);
  resumed_ = resume();
  if (resumed_) weights_there("checkpoint");
  // Data that the run cannot go on with is refused before any file of its folder changes.
  if (!finished()) open_stage(schedule_.stage(state_.step));
  if (resumed_) return;
  begin(init);
  weights_there("weights");
}

void Run::tune() {
  control_.progress("tuning", kLongPhase);
  if (stream_.backend() == Backend::kCuda) tune_products();
  start_.done("tuning");
}

void Run::describe_folder() {
  describe_run_folder(folder_, resolved_.yaml, config_.data.tokenizer);
  order_.note();
  write_run_status(folder_, {});
  described_ = true;
}

void Run::ended(ExitCode code, const std::string& message) {
  if (!described_) return;
  using State = RunStatus::State;
  const State state = code == ExitCode::kDone        ? State::kComplete
                      : code == ExitCode::kPreempted ? State::kStopped
                                                     : State::kFailed;
  try {
    if (lock_) lock_->check();
    write_run_status(folder_, {.state = state, .exit_code = code, .message = message});
  } catch (const Error& error) {
    log_debug("{}", error.what());  // how the run has ended counts more
  }
}

void Run::open_saver() {
  saver_.emplace(folder_, resolved_, control_, continued_);
  if (resumed_) saver_->set_saved_step(state_.step);
  // A validation that is made up for is saved.
  if (finished() && !state_.validation_due) return;
  require_shared_memory(control_, node_, Snapshotter::bytes_of(step_.params()),
                        "the copy that checkpoints are written from");
  step_.set_before_update(saver_->copy_from(step_.params()));
}

void Run::open_metrics() {
  MetricsOptions metrics;
  metrics.run_dir = folder_.string();
  metrics.config = config_.metrics;
  metrics.total_steps = schedule_.total_steps();
  metrics.tokens_per_step = config_.train.tokens_per_step();
  metrics.flops_per_token = causal_flops_per_token(model_, config_);
  metrics.peak_flops = config_.metrics.peak_tflops * 1e12 * control_.world();
  metrics.rank = control_.rank();
  metrics.world = control_.world();
  metrics.times_waits = stream_.backend() == Backend::kCuda;
  if (resumed_) metrics.resumed_step = state_.step;
  metrics.config_yaml = resolved_.yaml;
  metrics_.emplace(metrics);
}

// Waits for the weights, so that the time that they took is known.
void Run::weights_there(const char* phase) {
  ops::run(stream_, ops::Synchronize{});
  start_.done(phase);
}

// The weights of a run that begins.
void Run::begin(const InitFrom& init) {
  step_.params().initialize(config_.seed);
  if (!init.path.empty()) {
    return load_initial_weights(init, config_, *communicator_, model_.registry(), step_.params(),
                                folder_ / kInitFile);
  }
  std::error_code none;
  if (leads()) fs::remove(folder_ / kInitFile, none);  // of a run that was here before
}

// The choices of algorithms belong to the run: with others, a resumed run would round differently.
// All ranks time the alternatives, since the step takes them all, and then use those of rank 0.
void Run::tune_products() {
  const fs::path file = folder_ / "gemm.txt";
  const std::string known = communicator_->broadcast(leads() ? text_of_run_file(file) : "", 0);
  const std::string choices = communicator_->broadcast(step_.tune(known, leads()), 0);
  if (!alone()) ops::control(stream_).set_choices(choices);
  if (leads() && choices != known) replace_file(file, choices, {}, MissingFolders::kError);
}

// The state of a checkpoint is verified while it is loaded, so that it is read once. One that turns
// out to be damaged is replaced whole by the next older one.
bool Run::resume() {
  const std::string resume = communicator_->broadcast(leads() ? order_.resume() : "", 0);
  std::set<std::string> anew;
  std::string before;
  const auto use = [&](const CheckpointReader& checkpoint) {
    const Manifest& manifest = checkpoint.manifest();
    const std::string name = checkpoint.folder().string();
    check_resumable(checkpoint);
    // A key that is younger than the checkpoint has its default there.
    std::map<std::string, std::string> saved = manifest.fingerprints;
    saved.merge(identity_fields(resolved_.stored_fields(checkpoint)));
    check_identity(saved, identity_fields(resolved_.fields), config_.checkpoint.allow_changes,
                   name);
    before = saved["train.optimizer"];
    const bool same = before == config_.train.optimizer.type;
    anew = load_shards(checkpoint, step_.params(), /*with_state=*/true,
                       same ? StateFrom::kTheOptimizer : StateFrom::kAnotherOptimizer);
  };
  const auto start = std::chrono::steady_clock::now();
  const std::optional<CheckpointReader> checkpoint =
      resume_checkpoint(folder_, resume, use, make_rank_group(control_));
  if (!checkpoint) return false;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  step_.params().refresh();
  const Manifest& manifest = checkpoint->manifest();
  const std::string name = checkpoint->folder().string();
  // A false state under a valid checksum is no damage, and no reason to lose steps unasked.
  state_ = parse_run_state(checkpoint->state_json(), name + "/state.json");
  if (state_.step != manifest.step || state_.tokens != manifest.tokens) {
    fail(ExitCode::kNoCheckpoint,
         "{}/state.json: step {} and {} tokens, but the manifest has step {} and {} tokens", name,
         state_.step, state_.tokens, manifest.step, manifest.tokens);
  }
  step_.set_updates(state_.updates);
  step_.set_running_loss(state_.running);
  std::error_code other;
  if (fs::equivalent(checkpoint->folder().parent_path(), folder_ / "checkpoints", other)) {
    continued_ = {.step = state_.step, .updates = state_.updates, .last_good = manifest.last_good};
  }
  log_info("resumed from {} (step {}, {} tokens; {:.1f} MB in {:.2f} s)", name, state_.step,
           state_.tokens, static_cast<double>(manifest.bytes()) / 1e6, seconds.count());
  if (manifest.world != control_.world()) {
    log_info("the checkpoint was saved by {} rank{}, now there {} {}: each takes its ranges",
             manifest.world, manifest.world == 1 ? "" : "s", alone() ? "is" : "are",
             control_.world());
  }
  if (leads()) describe_new_state(name, before, anew);
  check_rate(name);
  return true;
}

// What the run keeps beside its weights and the checkpoint did not have.
void Run::describe_new_state(const std::string& checkpoint, const std::string& optimizer,
                             std::set<std::string> anew) const {
  if (anew.erase(kAverageKind) > 0) {
    log_info("{} has no average of the weights (train.ema): it begins with them", checkpoint);
  }
  const std::string& now = config_.train.optimizer.type;
  if (optimizer == now) return;
  log_warning("{} was saved with the optimizer {}, and the run goes on with {}: {}", checkpoint,
              optimizer, now,
              anew.empty() ? "it has all the state that this one keeps"
                           : fmt::format("where it has no {}, that begins with zeros",
                                         fmt::join(anew, ", ")));
}

// A stage that has been made longer, or another train.lr, changes the rates of the steps that lie
// behind as well, so the next one may be far from the last.
void Run::check_rate(const std::string& checkpoint) const {
  if (state_.step == 0 || state_.lr <= 0 || finished()) return;
  const double now = schedule_.lr(state_.step - 1);
  if (std::abs(now - state_.lr) <= 1e-9 * state_.lr) return;
  log_warning(
      "{}: step {} had learning rate {:.3g}, where the present schedule has {:.3g}, since stages, "
      "train.lr or train.batch have changed: the next step has {:.3g}",
      checkpoint, state_.step, state_.lr, now, schedule_.lr(state_.step));
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
  control_.progress("opening the data", kLongPhase);
  loader_ =
      std::make_unique<Loader>(loader_options(config_, mesh_, stage), state ? &*state : nullptr);
  // Every rank takes its rows from one order of the same data.
  agree(control_, data_fields(loader_->state()));
  start_.done("loader");
  loader_->check_vocab(config_.model.vocab);
  stage_ = stage;
}

void Run::train_one_step() {
  const int stage = schedule_.stage(state_.step);
  if (stage != stage_) open_stage(stage);
  // Another stage may have other data, whose losses are no spikes against those of the last one.
  if (state_.step == schedule_.stage_begin(stage)) step_.set_running_loss();
  std::vector<PackedBatch> micro_batches;
  for (int64_t n = 0; n < loader_->micro_batches_per_step(); ++n) {
    micro_batches.push_back(loader_->next());
  }
  control_.progress(fmt::format("step {}", state_.step + 1));
  const double lr = schedule_.lr(state_.step);
  PendingStep pending =
      step_.run(micro_batches, lr, alone() ? nullptr : StopSignals::flags(memory_.backend()));
  const double launched = metrics_->seconds();
  settle();
  state_.step += 1;
  state_.tokens += config_.train.tokens_per_step();
  enqueued_ = {.pending = std::move(pending), .step = state_.step, .lr = lr, .launched = launched};
  // A CPU has done the step already; that is no matter of luck, so all ranks learn alike what they
  // are asked for.
  if (memory_.backend() == Backend::kCpu) settle();
  if (alone()) note(take_requests());
}

Requests Run::take_requests() {
  return {.stop = signals_.stop_requested(), .save = signals_.save_requested()};
}

void Run::note(const Requests& requests) {
  requests_.stop |= requests.stop;
  requests_.save |= requests.save;
}

// When the enqueued step, for which the host has just waited, has ended. Where it had to wait that
// is now. Otherwise the device is faster than the host, or is the host, and the step has ended
// about when it was launched, but not before the step before it.
double Run::end_of_step(bool was_done) {
  const double now = metrics_->seconds();
  const double launched = enqueued_->launched;
  if (!was_done) return now;
  return launched >= ended_ ? launched : (ended_ + now) / 2;
}

// Waits for the enqueued step and records its result; its weights are in place afterwards.
void Run::settle() {
  if (!enqueued_) return;
  const bool was_done = enqueued_->pending.ready();
  const StepResult result = enqueued_->pending.wait();
  ended_ = end_of_step(was_done);
  // A step that the guard does not accept has changed nothing on the device either.
  guard_->accept(enqueued_->step, result.loss, result.grad_norm * result.grad_norm, enqueued_->lr,
                 result.spike ? &result.running : nullptr);
  state_.updates = result.updates;
  state_.running = result.running;
  state_.lr = enqueued_->lr;
  state_.guard = guard_->state();
  note(result.requests);
  metrics_->train_step({.step = enqueued_->step,
                        .loss = result.loss,
                        .lr = enqueued_->lr,
                        .grad_norm = result.grad_norm,
                        .skipped_steps = state_.guard.skipped,
                        .spike_steps = state_.guard.spikes,
                        .stage = schedule_.stage(enqueued_->step - 1),
                        .waited = result.waited,
                        .ended = ended_});
  enqueued_.reset();
  start_.first_step();
}

// A validation that a stop prevents or cuts off stays due, and is what the next start begins with.
void Run::validate() {
  if (!state_.validation_due || requests_.stop) return;
  settle();
  const MetricsPause pause(*metrics_);
  const std::optional<ValidationMetrics> result = validation_->measure(step_, control_, signals_);
  if (!result) return note({.stop = true});
  metrics_->validation(state_.step, *result);
  state_.validation_due = false;
  saver_->set_saved_step(-1);  // a checkpoint of this step still calls the validation due
  const double enough = config_.validation.stop_accuracy;
  if (enough > 0 && result->accuracy >= enough && !finished()) {
    log_info("step {}: accuracy {:.4f}, so the run ends here (validation.stop_accuracy {})",
             state_.step, *result->accuracy, enough);
    state_.stopped = true;
  }
}

// Training goes on while the state is copied; only the next update waits for that.
void Run::save() {
  settle();
  requests_.save = false;
  signals_.save_requested();  // this rank's, if it is one of those that have asked
  if (saver_->saved_step() == state_.step) return;
  const MetricsPause pause(*metrics_);
  if (loader_) state_.loader = loader_->state().to_json();
  control_.progress("saving", kLongPhase);
  metrics_->flush();
  saver_->save(state_, [this] { metrics_->sync(); });
}

// While steps are being skipped, the newest weights are in doubt, and a save waits for a step that
// is applied to them.
void Run::save_when_due() {
  if (due(config_.checkpoint.every)) requests_.save = true;
  if (!requests_.save) return;
  settle();
  if (state_.guard.in_a_row == 0) save();
}

bool Run::due(const Duration& every) const {
  const int64_t steps = every.steps(config_.train.tokens_per_step());
  return steps > 0 && state_.step % steps == 0;
}

ExitCode Run::train() {
  if (finished() && !state_.validation_due) {
    log_info("{} is complete: {} steps. Give it a longer stage, or another --out, to train on.",
             folder_.string(), state_.step);
    return ExitCode::kDone;
  }
  if (!resumed_) state_.validation_due = !validation_->empty();
  if (alone()) note(take_requests());
  validate();
  start_.done("validation");
  while (!finished() && !requests_.stop) {
    train_one_step();
    if (lock_) lock_->check();
    saver_->poll();
    const bool last = state_.step == schedule_.total_steps();
    state_.validation_due = !validation_->empty() && (last || due(config_.validation.every));
    validate();
    save_when_due();
  }
  return finish();
}

// Saves what the run ends with.
ExitCode Run::finish() {
  settle();
  if (finished() && !state_.stopped && state_.guard.not_finite()) {
    fail(ExitCode::kDiverged,
         "the last {} of {} steps were skipped because their losses or gradients were not finite; "
         "nothing shows the final weights to be good, and they are not saved; {}",
         state_.guard.in_a_row, state_.step, kAfterDivergence);
  }
  save();
  control_.progress("writing the last checkpoint", kLongPhase);
  saver_->finish();
  if (finished() && !state_.validation_due) {
    if (leads()) order_.forget();
    return ExitCode::kDone;
  }
  log_info("stopped by {} after step {}, saved; the same command continues",
           signals_.stop_requested() ? fmt::format("signal {}", signals_.signal())
                                     : "a signal to another rank",
           state_.step);
  return ExitCode::kPreempted;
}

}  // namespace

ExitCode train(const ResolvedConfig& resolved, Backend backend, const Job& job,
               const InitFrom& init) {
  Run run(resolved, backend, job, training_signals());
  try {
    run.prepare(init);
    const ExitCode code = run.train();
    run.ended(code);
    return code;
  } catch (const Error& error) {
    if (error.code() == ExitCode::kDiverged) run.forget_order();
    run.ended(error.code(), error.what());
    throw;
  }
}

}  // namespace sbtrain
