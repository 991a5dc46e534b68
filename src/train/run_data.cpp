#include "train/run_data.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

std::string training_tokenizer(const Config& config) {
  if (config.data.task.active()) return "";
  std::vector<SourceConfig> sources;
  for (const StageConfig& stage : config.stages) {
    const auto& own = stage.sources.empty() ? config.data.sources : stage.sources;
    sources.insert(sources.end(), own.begin(), own.end());
  }
  std::string hash = common_tokenizer(sources);
  if (!hash.empty() && !config.data.tokenizer.empty() &&
      Tokenizer(config.data.tokenizer).hash() != hash) {
    fail(ExitCode::kConfig, "data.tokenizer: {} is not what {} was prepared with",
         config.data.tokenizer, sources.front().path);
  }
  return hash;
}

LoaderOptions loader_options(const Config& config, const Mesh& mesh, int stage) {
  const std::vector<SourceConfig>& sources = config.stages[stage].sources;
  LoaderOptions options;
  options.sources = sources.empty() ? config.data.sources : sources;
  options.task = config.data.task;
  options.task_vocab = config.model.vocab;
  options.packing = config.data.packing;
  options.predict_across_documents = config.data.predict_across_documents;
  options.sequence_length = config.train.sequence_length;
  options.micro_batch = config.train.micro_batch;
  options.batch = config.train.batch;
  options.seed = config.seed;
  options.rank = mesh.data_rank();
  options.world = mesh.data_ranks();
  options.stage = stage;
  options.prefetch = config.data.prefetch;
  options.accept_changes = config.checkpoint.allow_changes;
  return options;
}

std::map<std::string, std::string> data_fields(const LoaderState& state) {
  std::map<std::string, std::string> fields;
  const nlohmann::json values = nlohmann::json::parse(state.to_json()).flatten();
  for (const auto& [path, value] : values.items()) {
    fields["(data)" + path] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return fields;
}

}  // namespace sbtrain
