// One optimizer step on the device: micro-batches forward and backward, global norm, AdamW.
#pragma once

#include <cstdint>
#include <span>

#include "config/config.h"
#include "core/stream.h"
#include "data/batch.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// Loss and gradient of one step, the same on every rank.
struct StepResult {
  double loss = 0;       // nats per valid target token, z-loss excluded
  double grad_norm = 0;  // global, before clipping
  int64_t updates = 0;   // applied so far
};

// A step that has been enqueued: the device may still be working on it.
class PendingStep {
 public:
  PendingStep(ops::HostRead stats, double valid_targets)
      : stats_(std::move(stats)), valid_targets_(valid_targets) {}
  StepResult wait();

 private:
  ops::HostRead stats_;
  double valid_targets_;
};

class TrainStep {
 public:
  // Plans or allocates everything that a step needs on the stream's backend.
  TrainStep(const Config& config, const Transformer& model, Stream& s, Communicator& communicator);

  ShardedParams& params() { return params_; }

  // Records the memory of a step and of a validation batch (Backend::kPlan only).
  void plan();

  // Lets ops choose the fastest of their alternatives for the shapes of a step. `known` choices are
  // kept (ops::begin_tuning); returns all choices. Weights must be in place; they do not change.
  std::string tune(const std::string& known);

  // Sets the number of updates applied so far, which AdamW's bias correction depends on.
  void set_updates(int64_t updates);

  // Every update waits for the last record of `event`, which must outlive the steps: whoever reads
  // the state on another stream records it (checkpoint/snapshotter.h).
  void set_before_update(const Event& event) { before_update_ = &event; }

  // One step: gradients of the mean loss over all valid targets of all micro-batches and ranks,
  // clipped to train.clip, then AdamW. A step whose loss or norm is not finite changes nothing.
  // Returns before the device has finished.
  PendingStep run(std::span<const PackedBatch> micro_batches, double lr);

  // Loss and hits of the batch's valid targets, of this rank only.
  BatchScore evaluate(const PackedBatch& batch);

 private:
  BatchTensors upload(const PackedBatch& batch);
  void accumulate(const BatchTensors& batch, float loss_weight);
  void apply(double lr);
  void sum_validation(const BatchTensors& batch);
  BatchTensors views(int64_t documents) const;

  const TrainConfig& config_;
  const Transformer& model_;
  Stream& stream_;
  Communicator& communicator_;
  ShardedParams params_;
  const Event* before_update_ = nullptr;
  int64_t tokens_;  // of a micro-batch
  Buffer tokens_T_, targets_T_, positions_T_, cu_seqlens_, loss_T_, hits_T_;
  Buffer stats_, validation_sums_;  // f64: ops::StepStat; losses, hits
};

}  // namespace sbtrain
