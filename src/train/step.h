// One optimizer step on the device: micro-batches forward and backward, global norm, AdamW.
#pragma once

#include <cstdint>
#include <span>

#include "config/config.h"
#include "core/stream.h"
#include "data/batch.h"
#include "model/llama.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// Loss and gradient of one step, the same on every rank.
struct StepResult {
  double loss = 0;       // nats per valid target token, z-loss excluded
  double grad_norm = 0;  // global, before clipping
  int64_t valid_targets = 0;
  bool finite() const;
};

class TrainStep {
 public:
  // Plans or allocates everything that a step needs on the stream's backend.
  TrainStep(const Config& config, const Llama& model, Stream& s, Communicator& communicator);

  ShardedParams& params() { return params_; }

  // Records the memory of a step and of a validation batch (Backend::kPlan only).
  void plan();

  // Gradients of the mean loss over all valid targets of all micro-batches and ranks.
  StepResult gradients(std::span<const PackedBatch> micro_batches);

  // AdamW with the gradients of the last gradients() call, clipped to train.clip.
  // `update` counts applied updates from 1 (bias correction).
  void update(const StepResult& result, double lr, int64_t update);

  // Sum of losses over the batch's valid targets, this rank's alone.
  double evaluate(const PackedBatch& batch);

 private:
  BatchTensors upload(const PackedBatch& batch);
  BatchTensors views(int64_t documents) const;

  const TrainConfig& config_;
  const Llama& model_;
  Stream& stream_;
  Communicator& communicator_;
  ShardedParams params_;
  int64_t tokens_;  // of a micro-batch
  Buffer tokens_T_, targets_T_, positions_T_, cu_seqlens_, loss_T_;
};

}  // namespace sbtrain
