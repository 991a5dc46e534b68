// Short runs of a small model on ranks that are threads, for tests of optimizers: with any world
// and mode, from and to checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/model_state.h"
#include "checkpoint/snapshotter.h"
#include "checkpoint/stored_runs.h"
#include "config/schema.h"
#include "parallel/param_shards.h"
#include "support/model.h"
#include "support/planned_step.h"
#include "support/process.h"
#include "support/thread_world.h"
#include "train/step.h"

namespace sbtrain::test {

// A configuration whose shards cut through tensors, with `train` as the keys of its optimizer.
inline Config optimizer_config(const std::string& train) {
  return parse_config(
      "model: {layers: 3, width: 12, inner: 20, heads: 4, kv_heads: 2, vocab: 23,\n"
      "        init_std: 0.3, attention: {type: softmax, position: none}}\n"
      "train: {sequence_length: 16, micro_batch: 1, batch: 8, clip: 0.5" +
          (train.empty() ? "" : ", " + train) +
          "}\n"
          "data: {sources: [{path: text.h5}]}\n"
          "stages: [{name: train, length: 100 steps}]\n",
      "test");
}

struct OptimizerRun {
  Sharding sharding = Sharding::kFull;
  int world = 1;
  int node_size = 1;
  int first = 0, last = 0;   // steps [first, last)
  std::string from{}, to{};  // folders of runs whose newest checkpoint is read and saved
  StateFrom state = StateFrom::kTheOptimizer;  // of `from`
  int bad_step = -1;                           // the losses of this step are not finite
  // Only the first sequence of a step has targets, so that gradients are the same in every world.
  bool one_sequence = false;
  bool planned = false;  // the memory follows a plan

  OptimizerRun steps(int begin, int end) const {
    OptimizerRun run = *this;
    run.first = begin;
    run.last = end;
    return run;
  }
};

inline void PrintTo(const OptimizerRun& run, std::ostream* out) {  // NOLINT: GoogleTest's name
  *out << name_of(run.sharding) << run.world;
}

// Whole tensors by kind and name, "adam_m/model.norm.weight", after the last step, and what rank 0
// saw of the losses.
struct OptimizerResult {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> tensors;
};

// Adds this rank's ranges; values that another rank has added must be the same.
inline void add_tensors(const ShardedParams& params, OptimizerResult& result) {
  for (const TensorShard& part : tensor_shards(params, /*with_state=*/true)) {
    std::vector<float>& whole = result.tensors[part.kind + "/" + part.name];
    int64_t count = 1;
    for (const int64_t n : part.shape) count *= n;
    whole.resize(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
    for_each_stored_run(part, part.begin, part.end,
                        [&](int64_t logical, int64_t stored, int64_t run) {
                          for (int64_t i = 0; i < run; ++i) {
                            const float value = part.stored.f32()[stored + i];
                            float& kept = whole[part.begin + logical + i];
                            if (!std::isnan(kept)) {
                              EXPECT_EQ(kept, value) << part.name;
                            }
                            kept = value;
                          }
                        });
  }
}

inline void save_step(ShardedParams& params, const std::string& folder, int64_t step,
                      const RankGroup& group) {
  Snapshotter snapshotter(params);
  Snapshot snapshot;
  snapshotter.begin(snapshot);
  snapshot.step = step;
  snapshot.state_json = "{}";
  save_checkpoint(Storage(), folder, snapshot, group, 1);
}

inline OptimizerResult run_optimizer(const Config& config, const OptimizerRun& run) {
  OptimizerResult result;
  std::mutex mutex;
  run_ranks(run.world, [&](Communicator& ranks) {
    const Mesh mesh(ranks, run.sharding, run.node_size);
    const RankGroup group{
        .rank = ranks.rank(), .world = ranks.world(), .exchange = [&](std::string text) {
          return ranks.all_gather(std::move(text));
        }};
    const Transformer model(config.model, Recompute::kNone, mesh.shard_count());
    Memory memory(Backend::kCpu);
    memory.poison();
    if (run.planned) adopt_step_plan(memory, config, model, mesh);
    Stream stream(memory);
    TrainStep step(config, model, stream, mesh);
    step.params().initialize(3);
    if (!run.from.empty()) {
      const auto use = [&](const CheckpointReader& reader) {
        load_shards(reader, step.params(), /*with_state=*/true, run.state);
      };
      ASSERT_TRUE(open_newest(run.from, nullptr, use, group));
      step.params().refresh();
      step.set_updates(run.first);
    }
    const int64_t share = config.train.batch / ranks.world();
    for (int n = run.first; n < run.last; ++n) {
      std::vector<PackedBatch> batches;
      for (int64_t m = 0; m < share; ++m) {
        const auto seed = static_cast<uint64_t>(n * config.train.batch + share * ranks.rank() + m);
        PackedBatch& batch = batches.emplace_back(packed_batch({5, 11}, config.model.vocab, seed));
        if (!run.one_sequence || share * ranks.rank() + m == 0) continue;
        std::ranges::fill(batch.targets, -1);
        batch.valid_targets = 0;
      }
      Tensor w = step.params().shard(1).weights;
      const float kept = w.f32()[0];
      const bool bad = n == run.bad_step && ranks.rank() == ranks.world() - 1;
      if (bad) w.f32()[0] = std::numeric_limits<float>::infinity();
      if (n == run.bad_step) step.params().refresh();
      const double loss = step.run(batches, 1e-2).wait().loss;
      if (bad) w.f32()[0] = kept;
      if (n == run.bad_step) step.params().refresh();
      if (ranks.rank() == 0 && n != run.bad_step) result.losses.push_back(loss);
    }
    if (!run.to.empty()) save_step(step.params(), run.to, run.last, group);
    const std::lock_guard lock(mutex);
    add_tensors(step.params(), result);
  });
  return result;
}

// Steps [stop, last) of a run that has been saved after `stop` steps, and has been on three ranks
// since, which change no bit of what is saved.
inline OptimizerResult run_resumed(const Config& config, const OptimizerRun& run, int stop,
                                   int last) {
  const TemporaryFolder saved, other;
  OptimizerRun head = run.steps(0, stop), rest = run.steps(stop, last);
  head.to = saved.path();
  rest.from = other.path();
  run_optimizer(config, head);
  run_optimizer(config,
                {.world = 3, .first = stop, .last = stop, .from = head.to, .to = rest.from});
  return run_optimizer(config, rest);
}

}  // namespace sbtrain::test
