// Optimizer steps of a model on the GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/device.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/communicator.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "train/run_config.h"
#include "train/step.h"

namespace sbtrain::test {

// Runs the steps with or without a plan.
class StepRun {
 public:
  StepRun(const Config& config, bool planned)
      : config_(config),
        model_(config_.model, config_.train.recompute),
        communicator_(make_single_process()),
        mesh_(*communicator_),
        memory_(Backend::kCuda),
        stream_(memory_) {
    if (planned) adopt_step_plan(memory_, config_, model_, mesh_);
    step_.emplace(config_, model_, stream_, mesh_);
    step_->params().initialize(5);
  }

  // Two micro-batches of several documents, none longer than the sequence length.
  std::vector<PackedBatch> batches(uint64_t step) const {
    std::vector<PackedBatch> out;
    const auto L = static_cast<int32_t>(config_.train.sequence_length);
    out.push_back(packed_batch({L - 30, 1, 29, L}, config_.model.vocab, 2 * step));
    out.push_back(packed_batch({L, 2, L - 2}, config_.model.vocab, 2 * step + 1));
    return out;
  }
  StepResult step(const std::vector<PackedBatch>& micro_batches) {
    return step_->run(micro_batches, 1e-3).wait();
  }
  // Losses and gradient norms of some steps, and a validation loss after them.
  std::vector<double> train(int steps) {
    std::vector<double> results;
    for (int n = 0; n < steps; ++n) {
      const StepResult result = step(batches(n));
      results.insert(results.end(), {result.loss, result.grad_norm});
    }
    results.push_back(step_->evaluate(batches(steps)[0]).loss);
    return results;
  }
  std::vector<float> weights() {
    std::vector<float> all;
    for (size_t u = 0; u < model_.registry().units().size(); ++u) {
      const Tensor& master = step_->params().shard(static_cast<int>(u)).weights;
      const size_t before = all.size();
      all.resize(before + static_cast<size_t>(master.numel()));
      ops::run(stream_, ops::CopyToHost{.host = all.data() + before, .x = master});
    }
    return all;
  }
  MemoryReport report() const { return memory_.report(); }

 private:
  const Config config_;
  const Transformer model_;
  std::unique_ptr<Communicator> communicator_;
  Mesh mesh_;
  Memory memory_;
  Stream stream_;
  std::optional<TrainStep> step_;
};

}  // namespace sbtrain::test
