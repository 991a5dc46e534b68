#include "train/initial_weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/weight_match.h"
#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "train/run_data.h"

namespace sbtrain {

void load_initial_weights(const InitFrom& init, const Config& config, Communicator& ranks,
                          const ParamRegistry& registry, ShardedParams& params,
                          const std::filesystem::path& record) {
  const bool leads = ranks.rank() == 0;
  InitialWeights weights;
  if (leads) weights = init.open(init.path);
  const std::string found = ranks.broadcast(leads ? weights.source->name() : "", 0);
  if (!leads) weights = init.open(found);
  const WeightSource& source = *weights.source;
  const WeightMatch match = match_weights(source, registry);
  check_match(match, found, init.initialise_missing);
  const std::string tokenizer = training_tokenizer(config);
  const std::vector<std::string>& allowed = config.checkpoint.allow_changes;
  if (!weights.tokenizer_hash.empty() && !tokenizer.empty() &&
      weights.tokenizer_hash != tokenizer &&
      std::find(allowed.begin(), allowed.end(), "data.tokenizer") == allowed.end()) {
    fail(ExitCode::kConfig,
         "{}: its tokens are those of the tokenizer {:.12}, and the data was prepared with {:.12}; "
         "prepare the data with the tokenizer of the weights, or allow it by "
         "--checkpoint.allow_changes='[data.tokenizer]'",
         found, weights.tokenizer_hash, tokenizer);
  }
  load_weights(source, params);
  params.refresh();
  if (!leads) return;
  log_info("the weights are those of {}", found);
  if (!match.missing.empty()) {
    log_info("initialised, since they are not there:\n  {}", fmt::join(match.missing, "\n  "));
  }
  if (!match.unexpected.empty()) {
    log_info("not used, since the model lacks them:\n  {}", fmt::join(match.unexpected, "\n  "));
  }
  if (record.empty()) return;
  const nlohmann::json text = {{"path", init.path},
                               {"weights", std::filesystem::absolute(found).string()},
                               {"initialised", match.missing},
                               {"not_used", match.unexpected}};
  replace_file(record, text.dump(2) + "\n", {}, MissingFolders::kError);
}

}  // namespace sbtrain
