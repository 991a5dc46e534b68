#include "cli/open_weights.h"

#include "checkpoint/weight_match.h"
#include "cli/run_tokenizer.h"
#include "core/log.h"
#include "export/hf_folder.h"

namespace sbtrain {
namespace {

// The hash of the tokenizer of a folder's weights; empty if it is not known.
std::string tokenizer_hash(const HfFolder& folder) {
  const std::string path = folder.tokenizer().string();
  if (path.empty() || !folder.tokenizer_hash().empty()) return folder.tokenizer_hash();
  try {
    return Tokenizer(path).hash();
  } catch (const Error& error) {
    log_warning("it is not checked that the data has the tokenizer of the weights: {}",
                error.what());
    return "";
  }
}

}  // namespace

InitialWeights open_weights(const std::string& path) {
  if (is_hf_folder(path)) {
    auto folder = std::make_unique<HfFolder>(path);
    std::string hash = tokenizer_hash(*folder);
    return {.source = std::move(folder), .tokenizer_hash = std::move(hash)};
  }
  // The data is verified when it is read. That is too late to take another checkpoint of a run.
  const auto use = [&](const CheckpointReader& checkpoint) {
    if (!is_checkpoint_folder(path)) verify_weights(checkpoint);
  };
  auto weights = std::make_unique<CheckpointWeights>(open_checkpoint(path, use));
  std::string hash = training_text(weights->checkpoint()).tokenizer_hash;
  return {.source = std::move(weights), .tokenizer_hash = std::move(hash)};
}

}  // namespace sbtrain
