// Weights of another model that a new run begins with.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/weight_source.h"
#include "model/params.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"
#include "train/run_config.h"

namespace sbtrain {

struct InitialWeights {
  std::unique_ptr<WeightSource> source;
  std::string tokenizer_hash;  // of the text that the weights were trained on; empty: unknown
};
struct InitFrom {
  std::string path;  // a checkpoint, a run folder, or a Hugging Face folder; empty: none
  bool initialise_missing = false;  // tensors that the weights lack are initialised, others unused
  // The weights at a path; called only by a run that begins.
  std::function<InitialWeights(const std::string& path)> open;
};

// All ranks load what rank 0 has found at the path: a run there may save a newer checkpoint
// meanwhile. Rank 0 logs where the weights come from and writes that to the file `record`, if there
// is one, as JSON. Throws ExitCode::kConfig if the names or shapes differ from those of the
// registry, or the tokenizer from that of the run's text, unless checkpoint.allow_changes has
// data.tokenizer.
void load_initial_weights(const InitFrom& init, const Config& config, Communicator& ranks,
                          const ParamRegistry& registry, ShardedParams& params,
                          const std::filesystem::path& record = {});

}  // namespace sbtrain
