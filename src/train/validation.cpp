#include "train/validation.h"

#include "eval/task_accuracy.h"
#include "train/run_data.h"

namespace sbtrain {
namespace {

HeldOutOptions held_out(const Config& config, const Mesh& mesh) {
  return {.paths = config.data.validation,
          .tokenizer = config.data.tokenizer,
          .tokenizer_hash = training_tokenizer(config),
          .vocab = config.model.vocab,
          .sequence_length = config.train.sequence_length,
          .micro_batch = config.train.micro_batch,
          .max_tokens = config.validation.tokens,
          .predict_across_documents = config.data.predict_across_documents,
          .rank = mesh.data_rank(),
          .world = mesh.data_ranks()};
}

}  // namespace

Validation::Validation(const Config& config, const Mesh& mesh)
    : micro_batch_(config.train.micro_batch),
      rank_(mesh.data_rank()),
      world_(mesh.data_ranks()),
      text_(held_out(config, mesh)) {
  if (!config.data.task.active()) return;
  task_.emplace(config.data.task, config.model.vocab, config.train.sequence_length, config.seed);
}

int64_t Validation::batches() const {
  return task_ ? (held_out_batches(*task_, micro_batch_) + world_ - 1) / world_ : text_.batches();
}

PackedBatch Validation::batch(int64_t i) const {
  return task_ ? held_out_batch(*task_, micro_batch_, i * world_ + rank_) : text_.batch(i);
}

std::optional<ValidationMetrics> Validation::measure(TrainStep& step, Control& control,
                                                     const StopSignals& signals) const {
  ValidationSums all;
  for (int64_t i = 0; i < batches(); ++i) {
    const PackedBatch own = batch(i);
    control.progress("validation");
    const ValidationSums sums =
        step.evaluate(own, task_ ? 0 : text_.bytes(own), signals.stop_requested());
    if (sums.stop) return std::nullopt;
    all.loss += sums.loss;
    all.hits += sums.hits;
    all.targets += sums.targets;
    all.bytes += sums.bytes;
  }
  ValidationMetrics metrics{.loss = all.loss / all.targets,
                            .tokens = static_cast<int64_t>(all.targets),
                            .bytes = static_cast<int64_t>(all.bytes)};
  if (task_) metrics.accuracy = all.hits / all.targets;
  return metrics;
}

}  // namespace sbtrain
