#include "export/hf_import.h"

#include <exception>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_match.h"
#include "config/schema.h"
#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "core/version.h"
#include "data/loader.h"
#include "model/transformer.h"
#include "tokenizer/tokenizer.h"
#include "train/run_state.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

// Copies the tokenizer; null if there is none. One that cannot be read here ends the import:
// without its tokenizer a model is of use only to who knows that it is missing.
std::unique_ptr<Tokenizer> copy_tokenizer(const HfFolder& folder, const fs::path& run) {
  const fs::path from = folder.tokenizer();
  if (from.empty()) return nullptr;
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = std::make_unique<Tokenizer>(from.string());
  } catch (const Error& error) {
    fail(error.code(), "{}; --without-tokenizer imports the model without it", error.what());
  }
  check_vocabulary(*tokenizer, folder.config().model.vocab);
  for (const TokenizerFile& file : tokenizer_files(from.string())) {
    replace_file(run / file.name, read_input(file.path, ExitCode::kData));
  }
  return tokenizer;
}

// The state of a run before its first step, which says how the model's texts are to be encoded.
// `known_hash` is the fingerprint of their tokenizer where that is not here.
std::string first_state(const Config& config, const Tokenizer* tokenizer,
                        const std::string& known_hash) {
  RunState state;
  if (tokenizer == nullptr && known_hash.empty()) return format_run_state(state);
  LoaderState loader;
  loader.packing = "concat";
  loader.sequence_length = config.train.sequence_length;
  loader.batch = config.train.batch;
  loader.micro_batch = config.train.micro_batch;
  loader.world = 1;
  loader.tokenizer_hash = tokenizer != nullptr ? tokenizer->hash() : known_hash;
  loader.starts_with_bos = tokenizer != nullptr && tokenizer->adds_bos();
  state.loader = loader.to_json();
  return format_run_state(state);
}

Snapshot snapshot_of(const Transformer& model) {
  Snapshot snapshot;
  for (const ParamUnit& unit : model.registry().units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      snapshot.tensors.push_back(
          {{kModelKind, tensor.name, tensor.spec.shape, 0, tensor.count}, {}, 0});
    }
  }
  return snapshot;
}

// Saves the folder's weights, and throws what a read has thrown: save_checkpoint() reports any
// failure as one of storage.
void save_weights(const HfFolder& folder, const Storage& storage, const fs::path& run,
                  Snapshot snapshot) {
  std::mutex mutex;
  std::exception_ptr refused;
  snapshot.read = [&](const TensorShard& tensor, int64_t begin, int64_t end, float* out) {
    try {
      read_finite(folder, tensor.name, begin, end, out);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!refused) refused = std::current_exception();
      throw;
    }
  };
  try {
    save_checkpoint(storage, run, snapshot, {}, /*keep=*/1);
  } catch (...) {
    if (refused) std::rethrow_exception(refused);
    throw;
  }
}

}  // namespace

HfImport import_hf(const HfFolder& folder, const fs::path& output, bool with_tokenizer) {
  Config config = folder.config();
  const Transformer model(config.model);
  check_match(match_weights(folder, model.registry()), folder.name());

  const Storage storage;
  const fs::path run = output.filename().empty() ? output.parent_path() : output;
  const fs::path unfinished = run.string() + ".tmp";
  storage.make_folders(unfinished);
  try {
    std::unique_ptr<Tokenizer> tokenizer;
    if (with_tokenizer) tokenizer = copy_tokenizer(folder, unfinished);
    config.name = run.filename().string();
    config.out = run.string();
    const std::string yaml = config_yaml(config);
    Snapshot snapshot = snapshot_of(model);
    snapshot.state_json = first_state(config, tokenizer.get(), folder.tokenizer_hash());
    snapshot.config_yaml = yaml;
    snapshot.fingerprints = identity_fields(flatten(config));
    save_weights(folder, storage, unfinished, std::move(snapshot));
    storage.replace_file(unfinished / "config.yaml", yaml);
    const nlohmann::json info = {{"version", version()},
                                 {"git_revision", git_revision()},
                                 {"imported_from", fs::absolute(folder.name()).string()},
                                 {"architecture", folder.architecture()}};
    storage.replace_file(unfinished / "run.json", info.dump(2) + "\n");
    storage.rename(unfinished, run);
    storage.sync_folder(fs::absolute(run).parent_path());
    return {.checkpoint = run / "checkpoints/step-00000000", .has_tokenizer = tokenizer != nullptr};
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(unfinished, ignored);
    throw;
  }
}

}  // namespace sbtrain
