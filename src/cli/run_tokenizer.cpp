#include "cli/run_tokenizer.h"

#include <filesystem>

#include "core/error.h"
#include "data/loader.h"
#include "serve/completions.h"
#include "train/run_state.h"

namespace sbtrain {
namespace fs = std::filesystem;

TrainingText training_text(const CheckpointReader& checkpoint) {
  const std::string file = checkpoint.folder().string() + "/state.json";
  const RunState state = parse_run_state(checkpoint.state_json(), file);
  if (state.loader.empty()) return {};  // saved before the first step
  const LoaderState loader = LoaderState::from_json(state.loader);
  return {.tokenizer_hash = loader.tokenizer_hash, .starts_with_bos = loader.starts_with_bos};
}

std::string run_tokenizer(const CheckpointReader& checkpoint, const Config& config,
                          const std::string& given) {
  if (!given.empty()) return given;
  // <run>/checkpoints/step-00000100
  const fs::path run = fs::absolute(checkpoint.folder()).parent_path().parent_path();
  const std::string copy = find_tokenizer(run.string());
  return copy.empty() ? config.data.tokenizer : copy;
}

void check_tokenizer(const Tokenizer& tokenizer, const TrainingText& text) {
  if (text.tokenizer_hash.empty() || tokenizer.hash() == text.tokenizer_hash) return;
  fail(ExitCode::kConfig,
       "{} (sha256 {:.12}) is not the tokenizer of the text that the model was trained on ({:.12})",
       tokenizer.path(), tokenizer.hash(), text.tokenizer_hash);
}

Tokenizer load_tokenizer(const CheckpointReader& checkpoint, const Config& config,
                         const TrainingText& text, const std::string& given) {
  const std::string path = run_tokenizer(checkpoint, config, given);
  if (path.empty()) {
    fail(ExitCode::kUsage, "the run's configuration names no tokenizer; give one with --tokenizer");
  }
  Tokenizer tokenizer(path, {.special = true});
  check_tokenizer(tokenizer, text);
  check_vocabulary(tokenizer, config.model.vocab);
  return tokenizer;
}

std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const TrainingText& text,
                                   const std::string& prompt) {
  std::vector<int32_t> tokens = prompt_tokens(tokenizer, text.starts_with_bos, prompt);
  if (tokens.empty()) {
    fail(ExitCode::kUsage, "{} has neither bos nor eos to start a document from: give a --prompt",
         tokenizer.path());
  }
  return tokens;
}

}  // namespace sbtrain
