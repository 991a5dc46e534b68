#include "train/step.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "ops/ops.h"

namespace sbtrain {

bool StepResult::finite() const {
  return std::isfinite(loss) && std::isfinite(grad_norm);
}

TrainStep::TrainStep(const Config& config, const Llama& model, Stream& s,
                     Communicator& communicator)
    : config_(config.train),
      model_(model),
      stream_(s),
      communicator_(communicator),
      params_(model.registry(), s, communicator, /*with_training=*/true),
      tokens_(config.train.micro_batch * config.train.sequence_length) {
  const auto input = [&](const char* name, DType dtype, int64_t n) {
    return s.memory().allocate(MemoryClass::kInputs, name, dtype, {n});
  };
  tokens_T_ = input("tokens", DType::kI32, tokens_);
  targets_T_ = input("targets", DType::kI32, tokens_);
  positions_T_ = input("positions", DType::kI32, tokens_);
  cu_seqlens_ = input("cu_seqlens", DType::kI32, tokens_ + 1);
  loss_T_ = input("loss", DType::kF32, tokens_);
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
  ops::copy_from_host(stream_, out.tokens_T, batch.tokens.data());
  ops::copy_from_host(stream_, out.targets_T, batch.targets.data());
  ops::copy_from_host(stream_, out.sequences.positions_T, batch.positions.data());
  ops::copy_from_host(stream_, out.sequences.cu_seqlens, batch.cu_seqlens.data());
  return out;
}

void TrainStep::plan() {
  require(stream_.planning(), "plan() needs Backend::kPlan");
  const BatchTensors batch = views(1);
  {
    const ProgramScope scope(stream_.memory(), "forward and backward");
    model_.forward_backward(stream_, params_, batch, loss_T_, 1.0f,
                            static_cast<float>(config_.z_loss));
  }
  {
    const ProgramScope scope(stream_.memory(), "validation");
    model_.evaluate(stream_, params_, batch, loss_T_);
  }
}

StepResult TrainStep::gradients(std::span<const PackedBatch> micro_batches) {
  double valid = 0;
  for (const PackedBatch& batch : micro_batches) valid += static_cast<double>(batch.valid_targets);
  communicator_.sum({&valid, 1});
  const float loss_weight = valid > 0 ? static_cast<float>(1.0 / valid) : 0.0f;

  params_.zero_gradients();
  double loss_sum = 0;
  for (const PackedBatch& batch : micro_batches) {
    const BatchTensors device = upload(batch);
    {
      const ProgramScope scope(stream_.memory(), "forward and backward");
      model_.forward_backward(stream_, params_, device, loss_T_, loss_weight,
                              static_cast<float>(config_.z_loss));
    }
    loss_sum += ops::sum(stream_, loss_T_);
  }
  communicator_.sum({&loss_sum, 1});
  return {.loss = valid > 0 ? loss_sum / valid : 0.0,
          .grad_norm = std::sqrt(params_.squared_gradient_norm()),
          .valid_targets = static_cast<int64_t>(valid)};
}

void TrainStep::update(const StepResult& result, double lr, int64_t update) {
  const double clip = config_.clip;
  const double scale = clip > 0 && result.grad_norm > clip ? clip / result.grad_norm : 1.0;
  const ParamRegistry& registry = model_.registry();
  for (size_t u = 0; u < registry.units().size(); ++u) {
    const ShardedParams::Shard& shard = params_.shard(static_cast<int>(u));
    for (const PlacedTensor& tensor : registry.units()[u].tensors) {
      // The part of the tensor that this rank owns.
      const int64_t begin = std::max(tensor.offset - shard.begin, int64_t{0});
      const int64_t end = std::min(tensor.offset + tensor.stored - shard.begin, shard.size);
      if (begin >= end) continue;
      const auto part = [&](const Tensor& flat) { return flat.row_range(begin, end - begin); };
      ops::adamw(stream_,
                 {.w_N = part(shard.master),
                  .m_N = part(shard.moment1),
                  .v_N = part(shard.moment2),
                  .grad_N = part(shard.gradient),
                  .lr = static_cast<float>(lr),
                  .beta1 = static_cast<float>(config_.beta1),
                  .beta2 = static_cast<float>(config_.beta2),
                  .eps = static_cast<float>(config_.eps),
                  .decay = tensor.spec.decay ? static_cast<float>(config_.weight_decay) : 0.0f,
                  .grad_scale = static_cast<float>(scale),
                  .step = update});
    }
  }
  params_.refresh();
}

double TrainStep::evaluate(const PackedBatch& batch) {
  const BatchTensors device = upload(batch);
  {
    const ProgramScope scope(stream_.memory(), "validation");
    model_.evaluate(stream_, params_, device, loss_T_);
  }
  return ops::sum(stream_, loss_T_);
}

}  // namespace sbtrain
