// One rank of a training of which one sequence of a step alone has targets, so that the gradients
// are the same for every number of ranks, and so has to be what an optimizer makes of them.
//   multi_rank update cpu|cuda OPTIMIZER SHARDING ENGINE FOLDER
// Saves into the folder after four steps. Rank 0 then prints "tensors DIGEST", of all weights and
// all that the optimizer keeps.
#include <iostream>

#include "checkpoint/snapshotter.h"
#include "config/schema.h"
#include "core/gpus.h"
#include "core/sha256.h"
#include "job/launch.h"
#include "multi/rank.h"
#include "parallel/make_communicator.h"
#include "support/optimizer_runs.h"
#include "support/planned_step.h"
#include "train/communicator_options.h"

namespace sbtrain::test {
namespace {

Config config_of(const char* optimizer, const char* sharding, const char* engine) {
  return parse_config(
      fmt::format(
          "model: {{layers: 3, width: 64, inner: 104, heads: 2, vocab: 101, init_std: 0.1}}\n"
          "train: {{sequence_length: 256, micro_batch: 1, batch: 8, clip: 0, optimizer: {}, "
          "sharding: {}, gather_engine: {}, reduce_engine: {}}}\n"
          "data: {{sources: [{{path: text.h5}}]}}\n"
          "stages: [{{name: train, length: 100 steps}}]\n",
          optimizer, sharding, engine, engine),
      "test");
}

void print_digest(const CheckpointReader& saved) {
  Sha256 digest;
  for (const std::string& kind : saved.kinds()) {
    for (const std::string& name : saved.names(kind)) {
      int64_t count = 1;
      for (const int64_t size : saved.shape(kind, name)) count *= size;
      std::vector<float> values(static_cast<size_t>(count));
      saved.read(kind, name, 0, count, values.data());
      digest.update(kind);
      digest.update(name);
      digest.update(values.data(), values.size() * sizeof(float));
    }
  }
  std::cout << "tensors " << digest.hex() << std::endl;
}

void train(const Config& config, Communicator& ranks, const Launch& launch, Backend backend,
           const std::string& folder) {
  const Mesh mesh(ranks, config.train.sharding, launch.local_world);
  const Transformer model(config.model, config.train.recompute, mesh.shard_count());
  Memory memory(backend);
  prepare_memory(memory, communicator_options(config.train), ranks.world());
  adopt_step_plan(memory, config, model, mesh);
  Stream stream(memory);
  TrainStep step(config, model, stream, mesh);
  step.params().initialize(3);
  const int64_t share = config.train.batch / ranks.world();
  for (int n = 0; n < 4; ++n) {
    std::vector<PackedBatch> batches;
    for (int64_t m = share * ranks.rank(); m < share * (ranks.rank() + 1); ++m) {
      const auto seed = static_cast<uint64_t>(n * config.train.batch + m);
      PackedBatch& batch = batches.emplace_back(packed_batch({200, 56}, config.model.vocab, seed));
      if (m == 0) continue;
      std::ranges::fill(batch.targets, -1);
      batch.valid_targets = 0;
    }
    step.run(batches, 1e-2).wait();
  }
  const RankGroup group{.rank = ranks.rank(),
                        .world = ranks.world(),
                        .exchange = [&](std::string text) { return ranks.all_gather(text); }};
  save_step(step.params(), folder, 4, group);
  ranks.barrier();
  if (ranks.rank() == 0) print_digest(*open_newest(folder));
}

}  // namespace

int run_update(int argc, char** argv) {
  if (argc != 5) return 2;
  const Launch launch = find_launch(process_environment());
  const auto control = make_control(launch, {.rendezvous = std::chrono::seconds(60)});
  const Backend backend = argv[0] == std::string("cuda") ? Backend::kCuda : Backend::kCpu;
  return static_cast<int>([&] {
    try {
      control->check();
      if (backend == Backend::kCuda) choose_gpu(launch.local_rank % visible_gpus());
      const Config config = config_of(argv[1], argv[2], argv[3]);
      const auto ranks = make_communicator(*control, backend, communicator_options(config.train));
      train(config, *ranks, launch, backend, argv[4]);
      control->finish();
      return ExitCode::kDone;
    } catch (const Error& e) {
      control->report({e.code(), e.what()});
      fmt::print(stderr, "{}\n", control->failure()->message);
      return control->failure()->code;
    }
  }());
}

}  // namespace sbtrain::test
