#include "train/step.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain {

StepResult PendingStep::wait() {
  const std::span<const double> stats = stats_.wait();
  return {.loss = valid_targets_ > 0 ? stats[ops::kLossSum] / valid_targets_ : 0.0,
          .grad_norm = std::sqrt(stats[ops::kSquaredNorm]),
          .updates = static_cast<int64_t>(stats[ops::kUpdates])};
}

TrainStep::TrainStep(const Config& config, const Transformer& model, Stream& s,
                     Communicator& communicator)
    : config_(config.train),
      model_(model),
      stream_(s),
      communicator_(communicator),
      params_(model.registry(), s, communicator, /*with_training=*/true),
      tokens_(config.train.micro_batch * config.train.sequence_length) {
  s.set_deterministic(config.train.deterministic);
  const auto input = [&](const char* name, DType dtype, int64_t n) {
    return s.memory().allocate(MemoryClass::kInputs, name, dtype, {n});
  };
  tokens_T_ = input("tokens", DType::kI32, tokens_);
  targets_T_ = input("targets", DType::kI32, tokens_);
  positions_T_ = input("positions", DType::kI32, tokens_);
  cu_seqlens_ = input("cu_seqlens", DType::kI32, tokens_ + 1);
  loss_T_ = input("loss", DType::kF32, tokens_);
  hits_T_ = input("hits", DType::kF32, tokens_);
  validation_sums_ = input("validation sums", DType::kF64, 2);
  stats_ = input("stats", DType::kF64, ops::kStepStats);
  ops::run(s, ops::Fill{.x = stats_, .value = 0.0f});
}

BatchTensors TrainStep::views(int64_t documents) const {
  return {.tokens_T = tokens_T_,
          .targets_T = targets_T_,
          .sequences = {.cu_seqlens = cu_seqlens_.tensor().row_range(0, documents + 1),
                        .positions_T = positions_T_,
                        .count = documents,
                        .max_seqlen = config_.sequence_length}};
}

BatchTensors TrainStep::upload(const PackedBatch& batch) {
  require(static_cast<int64_t>(batch.tokens.size()) == tokens_,
          "a micro-batch of {} tokens where the step has {}", batch.tokens.size(), tokens_);
  const BatchTensors out = views(static_cast<int64_t>(batch.cu_seqlens.size()) - 1);
  ops::run(stream_, ops::CopyFromHost{.y = out.tokens_T, .host = batch.tokens.data()});
  ops::run(stream_, ops::CopyFromHost{.y = out.targets_T, .host = batch.targets.data()});
  ops::run(stream_,
           ops::CopyFromHost{.y = out.sequences.positions_T, .host = batch.positions.data()});
  ops::run(stream_,
           ops::CopyFromHost{.y = out.sequences.cu_seqlens, .host = batch.cu_seqlens.data()});
  return out;
}

void TrainStep::plan() {
  require(stream_.planning(), "plan() needs Backend::kPlan");
  const BatchTensors batch = views(1);
  accumulate(batch, 1.0f);
  apply(0.0);
  sum_validation(batch);
}

std::string TrainStep::tune(const std::string& known) {
  const int64_t length = config_.sequence_length;
  PackedBatch batch;
  batch.tokens.assign(static_cast<size_t>(tokens_), 0);
  batch.targets.assign(static_cast<size_t>(tokens_), 0);
  for (int64_t t = 0; t < tokens_; ++t) {
    batch.positions.push_back(static_cast<int32_t>(t % length));
  }
  for (int64_t t = 0; t <= tokens_; t += length) {
    batch.cu_seqlens.push_back(static_cast<int32_t>(t));
  }
  ops::begin_tuning(stream_, known);
  accumulate(upload(batch), 1.0f / static_cast<float>(tokens_));
  return ops::end_tuning(stream_);
}

void TrainStep::set_updates(int64_t updates) {
  const auto value = static_cast<double>(updates);
  ops::run(stream_,
           ops::CopyFromHost{.y = stats_.tensor().row_range(ops::kUpdates, 1), .host = &value});
}

void TrainStep::accumulate(const BatchTensors& batch, float loss_weight) {
  const ProgramScope scope(stream_.memory(), "forward and backward");
  model_.forward_backward(stream_, params_, batch, loss_T_, loss_weight,
                          static_cast<float>(config_.z_loss));
  ops::run(stream_, ops::AddSum{.y_1 = stats_.tensor().row_range(ops::kLossSum, 1), .x = loss_T_});
}

void TrainStep::apply(double lr) {
  if (before_update_) stream_.wait(*before_update_);
  const ProgramScope scope(stream_.memory(), "update");
  params_.add_squared_gradient_norm(stats_.tensor().row_range(ops::kSquaredNorm, 1));
  communicator_.all_reduce(stream_, stats_.tensor().row_range(ops::kLossSum, 2));
  ops::run(
      stream_,
      ops::FinishStep{
          .stats = stats_, .clip = config_.clip, .beta1 = config_.beta1, .beta2 = config_.beta2});
  ops::AdamW adamw{.stats = stats_};
  adamw.lr = static_cast<float>(lr);
  adamw.beta1 = static_cast<float>(config_.beta1);
  adamw.beta2 = static_cast<float>(config_.beta2);
  adamw.eps = static_cast<float>(config_.eps);
  adamw.decay = static_cast<float>(config_.weight_decay);
  params_.update(adamw);
}

PendingStep TrainStep::run(std::span<const PackedBatch> micro_batches, double lr) {
  double valid = 0;
  for (const PackedBatch& batch : micro_batches) valid += static_cast<double>(batch.valid_targets);
  communicator_.sum({&valid, 1});
  const float loss_weight = valid > 0 ? static_cast<float>(1.0 / valid) : 0.0f;

  static_assert(ops::kSquaredNorm == ops::kLossSum + 1);
  ops::run(stream_, ops::Fill{.x = stats_.tensor().row_range(ops::kLossSum, 2), .value = 0.0f});
  params_.zero_gradients();
  for (const PackedBatch& batch : micro_batches) accumulate(upload(batch), loss_weight);
  apply(lr);
  return {ops::HostRead(stream_, stats_), valid};
}

void TrainStep::sum_validation(const BatchTensors& batch) {
  const ProgramScope scope(stream_.memory(), "validation");
  model_.evaluate(stream_, params_, batch, loss_T_, hits_T_);
  ops::run(stream_, ops::Fill{.x = validation_sums_, .value = 0.0f});
  ops::run(stream_, ops::AddSum{.y_1 = validation_sums_.tensor().row_range(0, 1), .x = loss_T_});
  ops::run(stream_, ops::AddSum{.y_1 = validation_sums_.tensor().row_range(1, 1), .x = hits_T_});
}

BatchScore TrainStep::evaluate(const PackedBatch& batch) {
  sum_validation(upload(batch));
  std::array<double, 2> sums{};
  ops::run(stream_, ops::CopyToHost{.host = sums.data(), .x = validation_sums_});
  return {.loss_sum = sums[0], .hits = sums[1]};
}

}  // namespace sbtrain
