// One optimizer step on the device: micro-batches forward and backward, global norm, update.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/graph.h"
#include "core/stream.h"
#include "data/batch_part.h"
#include "model/transformer.h"
#include "ops/stream_control.h"
#include "parallel/context_ring.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"
#include "train/guard.h"
#include "train/run_config.h"

namespace sbtrain {

// What ranks have been asked to do, by signals. It travels with the numbers that the ranks reduce
// anyway, so that all of them learn of it at the same place in their work.
struct Requests {
  bool stop = false;  // save and stop
  bool save = false;
};

// Loss and gradient of one step, the same on every rank.
struct StepResult {
  double loss = 0;       // nats per valid target token, z-loss excluded
  double grad_norm = 0;  // global, before clipping
  int64_t updates = 0;   // applied so far
  bool spike = false;    // skipped because of its loss, which is a spike against `running`
  RunningLoss running{};
  Requests requests{};  // of any rank
  // Seconds for which this rank's computation stood still for collectives; 0 on the CPU.
  double waited = 0;
};

// A step that has been enqueued: the device may still be working on it.
class PendingStep {
 public:
  PendingStep(std::unique_ptr<ops::HostRead> stats, WaitTimes& waits)
      : stats_(std::move(stats)), waits_(&waits) {}
  StepResult wait();
  bool ready() const { return stats_->ready(); }  // wait() would return at once

 private:
  std::unique_ptr<ops::HostRead> stats_;
  WaitTimes* waits_;
};

// Sums over a validation batch of each rank, the same on every rank.
struct ValidationSums {
  double loss = 0;     // nats, of the valid targets
  double hits = 0;     // valid targets that the model held most likely
  double targets = 0;  // valid
  double bytes = 0;    // of the text of those targets, as the callers counted them
  bool stop = false;   // a rank was asked to stop
};

class TrainStep {
 public:
  // Plans or allocates everything that a step needs on the stream's backend.
  TrainStep(const Config& config, const Transformer& model, Stream& s, const Mesh& mesh);

  ShardedParams& params() { return params_; }

  // Of the host's memory, page-locked on a GPU, that a step takes beside that of its backend
  // (train.offload).
  size_t host_bytes() const { return offload_ ? offload_->bytes() : 0; }

  // Records the memory of a step and of a validation batch (Backend::kPlan only): every program
  // once.
  void plan();
  // Records a whole step, each of its micro-batches (Backend::kPlan only).
  void plan_step();

  // Lets ops choose the fastest of their alternatives for the shapes of a step. `known` choices are
  // kept, and remembered if told so (ops::begin_tuning); returns all choices. Weights must be in
  // place; they do not change.
  std::string tune(const std::string& known, bool remember = true);

  // Sets the number of updates applied so far, which bias corrections depend on.
  void set_updates(int64_t updates);
  // Sets the running loss, which spikes are told by; without arguments it begins anew.
  void set_running_loss(const RunningLoss& running = {});

  // Every update waits for the last record of `event`, which must outlive the steps: whoever reads
  // the state on another stream records it (checkpoint/snapshotter.h).
  void set_before_update(const Event& event) { before_update_ = &event; }

  // One step, whose micro-batches are the same on all ranks that share sequences: gradients of the
  // mean loss over all valid targets of all micro-batches and ranks, clipped to train.clip, then
  // the update of the optimizer. A step whose loss or norm is not finite, or whose loss is a spike
  // (train.spike_sigma), changes nothing but the result's numbers. Loss, norm, the number of
  // targets and the ranks' requests take one reduction. This rank's are two numbers, 1 for a stop
  // and for a save, in page-locked memory, which the device reads just before that reduction
  // (train/signals.h); null: none. Returns before the device has finished.
  PendingStep run(std::span<const PackedBatch> micro_batches, double lr,
                  const double* requests = nullptr);

  // Evaluates a batch on each rank, or on all that share sequences, and waits for the sums. Every
  // rank makes the same number of calls; one without data passes a batch without valid targets.
  ValidationSums evaluate(const PackedBatch& batch, int64_t bytes = 0, bool stop = false);

  // What each layer's attention reads of the keys of a batch (model/inference/maps.h), on this
  // rank; not where ranks share sequences. `model` is that of the steps with Recompute::kNone.
  // Every rank calls it. plan_keys_read() records its memory (Backend::kPlan only).
  std::vector<KeysRead> keys_read(const Transformer& model, const PackedBatch& batch);
  void plan_keys_read(const Transformer& model);

 private:
  int64_t micro_batches_per_step() const;  // of this rank
  void plan_micro_batches(const BatchTensors& batch, int64_t count);
  BatchTensors upload(const PackedBatch& batch);
  int64_t valid_targets(const PackedBatch& batch) const;
  // Whether only some tokens of a micro-batch can have a target (BatchTensors::rows_S).
  bool some_have_targets() const { return targets_ < tokens_; }
  void accumulate(const BatchTensors& batch, ShardedParams::MicroBatch micro_batch);
  void forward_backward(const BatchTensors& batch, ShardedParams::MicroBatch micro_batch);
  void apply(double lr, const double* requests);
  // Whether the work of micro-batches is recorded (train.cuda_graph).
  bool records() const;
  void add_validation(const BatchTensors& batch);
  std::vector<KeysRead> count_keys(const Transformer& model, const BatchTensors& batch);
  // Elements [first, first + n) of one of the arrays of inputs_.
  Tensor input(int64_t array, int64_t first, int64_t n) const;
  BatchTensors views(int64_t documents) const;
  void set_documents(ContextChunk& chunk, int64_t documents);
  BatchPart part_of_chunk(const PackedBatch& batch, const ContextChunk& chunk) const;

  const TrainConfig& config_;
  const Transformer& model_;
  Stream& stream_;
  const Mesh& mesh_;
  const std::shared_ptr<const Optimizer> optimizer_;
  ShardedParams params_;
  const bool records_;
  CapturedGraph graph_;
  const Event* before_update_ = nullptr;
  int64_t tokens_;   // of a micro-batch, on this rank
  int64_t targets_;  // those of them that can have a target, at most
  // Where ranks share sequences, the others, and this rank's part of the present micro-batch.
  std::optional<ContextRing> ring_;
  ContextShare context_;
  std::optional<ActivationOffload> offload_;
  // Of a micro-batch, i32: one copy brings tokens, targets, positions, cu_seqlens and what chunks
  // have, or which tokens have a target, each from a multiple of inputs_stride_ elements on.
  int64_t inputs_stride_;
  Buffer inputs_;
  Buffer loss_S_, hits_S_;
  Buffer stats_, validation_sums_;  // f64: ops::StepStat; the values of ValidationSums
};

}  // namespace sbtrain
