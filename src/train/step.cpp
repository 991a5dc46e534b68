#include "train/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/fp8.h"
#include "model/inference/maps.h"
#include "ops/memory.h"
#include "ops/optimizer.h"
#include "ops/stream_control.h"
#include "train/batch_share.h"
#include "train/random_rows.h"

namespace sbtrain {
namespace {

// The micro-batches of a step differ in the collectives at their ends, so each kind is a program.
const char* program_name(ShardedParams::MicroBatch micro_batch) {
  if (micro_batch.first && micro_batch.last) return "only micro-batch";
  if (micro_batch.first) return "first micro-batch";
  return micro_batch.last ? "last micro-batch" : "middle micro-batch";
}

// The arrays of a micro-batch in the order in which they lie in memory. Where ranks share
// sequences, there are kCutPositions, which begin anew with each chunk, and cu_seqlens of each
// chunk; elsewhere, where only some tokens have a target, which ones (BatchTensors::rows_S).
enum InputArray : uint8_t {
  kTokens,
  kInputTargets,
  kPositions,
  kCuSeqlens,
  kAlways,
  kCutPositions = kAlways,
  kCuSeqlensOfSecondChunk,
  kTargetRows = kAlways,
  kTargetSlots,
  kMost
};
int64_t input_arrays(bool shared, ContextLayout layout, bool some_have_targets) {
  if (shared) return layout == ContextLayout::kFolded ? kMost : kCuSeqlensOfSecondChunk;
  return some_have_targets ? kMost : kAlways;
}

enum ValidationSum : uint8_t {
  kValidationLoss,
  kValidationHits,
  kValidationTargets,
  kValidationBytes,
  kValidationStop,
  kValidationSums
};

// The part of a step's numbers that the ranks contribute to.
Tensor summed(const Tensor& stats) {
  return stats.row_range(0, ops::kSummedStats);
}

// The tokens of a micro-batch that have a target, at most `most`, as BatchTensors has them: the
// rest of `rows` are the first token again, whose target there is ignored.
struct Labelled {
  std::vector<int32_t> targets, rows, slots;
};
Labelled labelled_of(const std::vector<int32_t>& targets, int64_t most) {
  Labelled out;
  for (size_t t = 0; t < targets.size(); ++t) {
    const bool has = targets[t] >= 0;
    out.slots.push_back(static_cast<int32_t>(has ? static_cast<int64_t>(out.rows.size()) : most));
    if (!has) continue;
    out.targets.push_back(targets[t]);
    out.rows.push_back(static_cast<int32_t>(t));
  }
  require(static_cast<int64_t>(out.rows.size()) <= most,
          "{} tokens with a target in a micro-batch that can have {}", out.rows.size(), most);
  out.targets.resize(static_cast<size_t>(most), -1);
  out.rows.resize(static_cast<size_t>(most), 0);
  return out;
}

// Tokens that tensor cores do not take in fp8 are multiplied as they are held.
bool in_fp8(const Config& config, const Mesh& mesh) {
  const int64_t tokens =
      config.train.micro_batch * config.train.sequence_length / mesh.size(MeshDimension::kContext);
  return config.train.precision == Precision::kFp8 && tokens % kFp8Multiple == 0;
}

}  // namespace

StepResult PendingStep::wait() {
  const std::span<const double> stats = stats_->wait();
  const double targets = std::max(stats[ops::kValidTargets], 1.0);
  return {
      .loss = stats[ops::kLossSum] / targets,
      .grad_norm = std::sqrt(stats[ops::kSquaredNorm]) / targets,
      .updates = static_cast<int64_t>(stats[ops::kUpdates]),
      .spike = stats[ops::kSpike] != 0,
      .running = {.count = static_cast<int64_t>(stats[ops::kLossCount]),
                  .mean = stats[ops::kLossMean],
                  .variance = stats[ops::kLossVariance]},
      .requests = {.stop = stats[ops::kStopRequests] > 0, .save = stats[ops::kSaveRequests] > 0},
      .waited = waits_->take_batch()};
}

TrainStep::TrainStep(const Config& config, const Transformer& model, Stream& s, const Mesh& mesh)
    : config_(config.train),
      model_(model),
      stream_(s),
      mesh_(mesh),
      optimizer_(make_optimizer(config.train.optimizer)),
      params_(model.registry(), s, mesh, optimizer_, config.train.reduce_dtype,
              config.train.reduce_engine, config.train.ema,
              in_fp8(config, mesh) ? Precision::kFp8 : Precision::kBf16),
      records_(records()),
      graph_(s),
      tokens_(config.train.micro_batch * config.train.sequence_length /
              mesh.size(MeshDimension::kContext)),
      targets_(std::min(tokens_, config.train.micro_batch * targets_of_row(config))),
      inputs_stride_((tokens_ + 1 + 63) / 64 * 64) {
  if (config_.cuda_graph == CudaGraph::kOn && mesh.world().world() > 1) {
    fail(ExitCode::kConfig,
         "train.cuda_graph is for one GPU, and there are {} ranks: what they exchange is no part "
         "of a graph. Set it to false",
         mesh.world().world());
  }
  if (mesh.context() != nullptr) {
    ring_.emplace(*mesh.context(), *params_.communication(), params_.wait_times());
    context_.ranks = &*ring_;
    context_.layout =
        context_layout(config_, [&](double keys) { return model.flops_per_token(keys); });
    context_.tokens = tokens_;
    for (const int place : places_of(context_.layout, ring_->place(), ring_->size())) {
      context_.chunks.push_back({.place = place});
    }
  }
  if (config_.offload == Offload::kActivations) {
    offload_.emplace(s, config.model.layers, tokens_, config.model.width);
  }
  s.set_deterministic(config.train.deterministic);
  s.set_precision(in_fp8(config, mesh) ? Precision::kFp8 : Precision::kBf16);
  ops::control(s).set_overlap(records_);
  const auto allocate = [&](const char* name, DType dtype, int64_t n) {
    return s.memory().allocate(MemoryClass::kInputs, name, dtype, {n});
  };
  inputs_ = allocate(
      "micro-batch", DType::kI32,
      input_arrays(ring_.has_value(), context_.layout, some_have_targets()) * inputs_stride_);
  for (ContextChunk& chunk : context_.chunks) set_documents(chunk, 1);
  loss_S_ = allocate("loss", DType::kF32, targets_);
  hits_S_ = allocate("hits", DType::kF32, targets_);
  validation_sums_ = allocate("validation sums", DType::kF64, kValidationSums);
  stats_ = allocate("stats", DType::kF64, ops::kStepStats);
  ops::run(s, ops::Fill{.x = stats_, .value = 0.0f});
}

// From 1e12 operations on, a micro-batch takes milliseconds, and its kernels longer than it takes
// to give them to the GPU. A record has the work of one stream, and copies to the host have
// another.
bool TrainStep::records() const {
  if (config_.offload != Offload::kNone) return false;
  if (config_.cuda_graph != CudaGraph::kAuto) return config_.cuda_graph == CudaGraph::kOn;
  const auto tokens = static_cast<double>(config_.micro_batch * config_.sequence_length);
  const auto keys = static_cast<double>(config_.sequence_length) / 2;
  return mesh_.world().world() == 1 && model_.flops_per_token(keys) * tokens < 1e12;
}

Tensor TrainStep::input(int64_t array, int64_t first, int64_t n) const {
  return inputs_.tensor().row_range(array * inputs_stride_ + first, n);
}

BatchTensors TrainStep::views(int64_t documents) const {
  BatchTensors batch{.tokens_T = input(kTokens, 0, tokens_),
                     .targets_T = input(kInputTargets, 0, targets_),
                     .sequences = {.cu_seqlens = {},
                                   .positions_T = input(kPositions, 0, tokens_),
                                   .count = documents,
                                   .max_seqlen = config_.sequence_length}};
  if (ring_) {
    batch.sequences.reach = config_.sequence_length;
    batch.sequences.context = &context_;
  } else {
    batch.sequences.cu_seqlens = input(kCuSeqlens, 0, documents + 1);
  }
  if (some_have_targets()) {
    batch.rows_S = input(kTargetRows, 0, targets_);
    batch.slots_T = input(kTargetSlots, 0, tokens_);
  }
  return batch;
}

void TrainStep::set_documents(ContextChunk& chunk, int64_t documents) {
  const bool second = &chunk != context_.chunks.data();
  const int64_t tokens = context_.chunk_tokens();
  chunk.documents = {
      .cu_seqlens = input(second ? kCuSeqlensOfSecondChunk : kCuSeqlens, 0, documents + 1),
      .positions_T = input(kCutPositions, second ? tokens : 0, tokens),
      .count = documents,
      .max_seqlen = std::min(config_.sequence_length, tokens),
      .reach = config_.sequence_length};
}

BatchPart TrainStep::part_of_chunk(const PackedBatch& batch, const ContextChunk& chunk) const {
  return part_of(batch, chunk.place, chunks_of_rank(context_.layout) * ring_->size());
}

// Of this rank's part.
int64_t TrainStep::valid_targets(const PackedBatch& batch) const {
  if (!ring_) return batch.valid_targets;
  int64_t targets = 0;
  for (const ContextChunk& chunk : context_.chunks) {
    targets += part_of_chunk(batch, chunk).batch.valid_targets;
  }
  return targets;
}

BatchTensors TrainStep::upload(const PackedBatch& batch) {
  const auto ranks = static_cast<size_t>(ring_ ? ring_->size() : 1);
  require(batch.tokens.size() == static_cast<size_t>(tokens_) * ranks,
          "a micro-batch of {} tokens where the step has {}", batch.tokens.size(),
          static_cast<size_t>(tokens_) * ranks);
  std::vector<int32_t> host(static_cast<size_t>(inputs_.tensor().rows()));
  const auto put = [&](InputArray i, const std::vector<int32_t>& values, int64_t first = 0) {
    require(first + static_cast<int64_t>(values.size()) <= inputs_stride_, "{} values of {} tokens",
            values.size(), tokens_);
    std::ranges::copy(values, host.begin() + i * inputs_stride_ + first);
  };
  const auto put_tokens = [&](const PackedBatch& part, int64_t first) {
    put(kTokens, part.tokens, first);
    put(kInputTargets, part.targets, first);
    put(kPositions, part.positions, first);
  };
  const auto documents = [](const PackedBatch& part) {
    return static_cast<int64_t>(part.cu_seqlens.size()) - 1;
  };
  int64_t count = 0, first = 0;
  for (ContextChunk& chunk : context_.chunks) {
    const BatchPart part = part_of_chunk(batch, chunk);
    put_tokens(part.batch, first);
    put(kCutPositions, part.cut_positions, first);
    put(first == 0 ? kCuSeqlens : kCuSeqlensOfSecondChunk, part.batch.cu_seqlens);
    chunk.continued = part.continued;
    chunk.earlier = part.earlier;
    set_documents(chunk, documents(part.batch));
    count += documents(part.batch);
    first += context_.chunk_tokens();
  }
  if (!ring_) {
    put_tokens(batch, 0);
    put(kCuSeqlens, batch.cu_seqlens);
    count = documents(batch);
  }
  if (some_have_targets()) {
    const Labelled labelled = labelled_of(batch.targets, targets_);
    put(kInputTargets, labelled.targets);
    put(kTargetRows, labelled.rows);
    put(kTargetSlots, labelled.slots);
  }
  ops::run(stream_, ops::CopyFromHost{.y = inputs_, .host = host.data()});
  return views(count);
}

void TrainStep::plan() {
  require(stream_.planning(), "plan() needs Backend::kPlan");
  const BatchTensors batch = views(1);
  plan_micro_batches(batch, std::min<int64_t>(micro_batches_per_step(), 3));  // first, middle, last
  apply(0.0, nullptr);
  add_validation(batch);
}

void TrainStep::plan_step() {
  require(stream_.planning(), "plan_step() needs Backend::kPlan");
  plan_micro_batches(views(1), micro_batches_per_step());
  apply(0.0, nullptr);
}

int64_t TrainStep::micro_batches_per_step() const {
  return config_.batch / (config_.micro_batch * mesh_.data_ranks());
}

void TrainStep::plan_micro_batches(const BatchTensors& batch, int64_t count) {
  for (int64_t n = 0; n < count; ++n) {
    accumulate(batch, {.first = n == 0, .last = n + 1 == count});
  }
}

std::string TrainStep::tune(const std::string& known, bool remember) {
  // Not of one token: of rows that are alike, sums in any order would be the same.
  const PackedBatch batch =
      random_rows(config_, model_.config(),
                  some_have_targets() ? targets_ / config_.micro_batch : config_.sequence_length);
  ops::begin_tuning(stream_, known);
  // The first micro-batch overwrites gradients that later ones add to: other products.
  // These are programs of the plan, so that tuning takes no memory of its own.
  const int64_t kinds = std::min<int64_t>(micro_batches_per_step(), 2);
  for (int64_t n = 0; n < kinds; ++n) {
    accumulate(upload(batch), {.first = n == 0, .last = n + 1 == kinds});
  }
  params_.wait_times().drop();
  return ops::end_tuning(stream_, remember);
}

void TrainStep::set_updates(int64_t updates) {
  const auto value = static_cast<double>(updates);
  ops::run(stream_,
           ops::CopyFromHost{.y = stats_.tensor().row_range(ops::kUpdates, 1), .host = &value});
}

void TrainStep::set_running_loss(const RunningLoss& running) {
  static_assert(ops::kLossMean == ops::kLossCount + 1 && ops::kLossVariance == ops::kLossMean + 1);
  const std::array values = {static_cast<double>(running.count), running.mean, running.variance};
  ops::run(stream_, ops::CopyFromHost{.y = stats_.tensor().row_range(ops::kLossCount, 3),
                                      .host = values.data()});
}

// Gradients are those of the sum of the losses, since the number of targets of all ranks is known
// only after the reduction: FinishStep divides by it.
void TrainStep::accumulate(const BatchTensors& batch, ShardedParams::MicroBatch micro_batch) {
  if (!records_) return forward_backward(batch, micro_batch);
  // Apart from the contents of the inputs, only the number of documents differs between steps.
  graph_.run(program_name(micro_batch), batch.sequences.count,
             [&] { forward_backward(batch, micro_batch); });
}

void TrainStep::forward_backward(const BatchTensors& batch, ShardedParams::MicroBatch micro_batch) {
  const ProgramScope scope(stream_.memory(), program_name(micro_batch));
  params_.begin(micro_batch);
  model_.forward_backward(stream_, params_, batch, loss_S_, /*loss_weight=*/1.0f,
                          static_cast<float>(config_.z_loss), offload_ ? &*offload_ : nullptr);
  ops::run(stream_, ops::AddSum{.y_1 = stats_.tensor().row_range(ops::kLossSum, 1), .x = loss_S_});
  params_.join();
}

void TrainStep::apply(double lr, const double* requests) {
  if (before_update_) stream_.wait(*before_update_);
  const ProgramScope scope(stream_.memory(), "update");
  params_.add_squared_gradient_norm(stats_.tensor().row_range(ops::kSquaredNorm, 1));
  if (requests != nullptr) {
    static_assert(ops::kSaveRequests == ops::kStopRequests + 1);
    const Tensor asked = stats_.tensor().row_range(ops::kStopRequests, 2);
    ops::run(stream_, ops::FetchFromHost{.y = asked, .host = requests});
  }
  mesh_.world().all_reduce(stream_, summed(stats_));
  ops::run(stream_, ops::FinishStep{.stats = stats_,
                                    .clip = config_.clip,
                                    .beta1 = optimizer_->means().first,
                                    .beta2 = optimizer_->means().second,
                                    .spike_sigma = config_.spike_sigma,
                                    .spike_window = static_cast<double>(config_.spike_window)});
  params_.update({.stats = stats_,
                  .lr = static_cast<float>(lr),
                  .weight_decay = static_cast<float>(config_.weight_decay)});
}

PendingStep TrainStep::run(std::span<const PackedBatch> micro_batches, double lr,
                           const double* requests) {
  std::array<double, ops::kSummedStats> mine{};
  for (const PackedBatch& batch : micro_batches) {
    mine[ops::kValidTargets] += static_cast<double>(valid_targets(batch));
  }
  ops::run(stream_, ops::CopyFromHost{.y = summed(stats_), .host = mine.data()});
  for (size_t n = 0; n < micro_batches.size(); ++n) {
    accumulate(upload(micro_batches[n]), {.first = n == 0, .last = n + 1 == micro_batches.size()});
  }
  apply(lr, requests);
  params_.wait_times().end_batch();
  return {ops::control(stream_).read(stats_), params_.wait_times()};
}

void TrainStep::add_validation(const BatchTensors& batch) {
  const ProgramScope scope(stream_.memory(), "validation");
  model_.evaluate(stream_, params_, batch, loss_S_, hits_S_);
  const auto sum = [&](int64_t i) { return validation_sums_.tensor().row_range(i, 1); };
  ops::run(stream_, ops::AddSum{.y_1 = sum(kValidationLoss), .x = loss_S_});
  ops::run(stream_, ops::AddSum{.y_1 = sum(kValidationHits), .x = hits_S_});
  params_.join();
  mesh_.world().all_reduce(stream_, validation_sums_);
}

ValidationSums TrainStep::evaluate(const PackedBatch& batch, int64_t bytes, bool stop) {
  std::array<double, kValidationSums> sums{};
  sums[kValidationTargets] = static_cast<double>(valid_targets(batch));
  // All ranks that share the batch have been given the same number.
  sums[kValidationBytes] =
      mesh_.place(MeshDimension::kContext) == 0 ? static_cast<double>(bytes) : 0;
  sums[kValidationStop] = stop ? 1 : 0;
  ops::run(stream_, ops::CopyFromHost{.y = validation_sums_, .host = sums.data()});
  add_validation(upload(batch));
  ops::run(stream_, ops::CopyToHost{.host = sums.data(), .x = validation_sums_});
  params_.wait_times().drop();
  return {.loss = sums[kValidationLoss],
          .hits = sums[kValidationHits],
          .targets = sums[kValidationTargets],
          .bytes = sums[kValidationBytes],
          .stop = sums[kValidationStop] > 0};
}

std::vector<KeysRead> TrainStep::count_keys(const Transformer& model, const BatchTensors& batch) {
  const ProgramScope scope(stream_.memory(), "keys read");
  std::vector<KeysRead> layers = sbtrain::keys_read(stream_, model, params_, batch);
  params_.join();
  params_.wait_times().drop();
  return layers;
}

std::vector<KeysRead> TrainStep::keys_read(const Transformer& model, const PackedBatch& batch) {
  require(!ring_, "keys are counted where every rank has whole sequences");
  return count_keys(model, upload(batch));
}

void TrainStep::plan_keys_read(const Transformer& model) {
  require(stream_.planning(), "plan_keys_read() needs Backend::kPlan");
  count_keys(model, views(1));
}

}  // namespace sbtrain
