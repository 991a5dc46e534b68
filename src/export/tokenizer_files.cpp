#include "export/tokenizer_files.h"

#include <sentencepiece_processor.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"
#include "data/tokenizer.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

using nlohmann::ordered_json;

constexpr const char* kConfigName = "tokenizer_config.json";

// A sentencepiece model. LlamaTokenizer reads it; `legacy` would treat spaces after special tokens
// in another way than sentencepiece does.
ordered_json sentencepiece_config(const std::string& model, const std::string& path,
                                  bool starts_with_bos, int64_t max_length) {
  sentencepiece::SentencePieceProcessor processor;
  if (!processor.LoadFromSerializedProto(model).ok()) {
    fail(ExitCode::kData, "{}: not a sentencepiece model", path);
  }
  const auto piece = [&](int id) -> ordered_json {
    if (id < 0) return nullptr;
    return processor.IdToPiece(id);
  };
  const std::vector<std::string> pieces = processor.EncodeAsPieces("a");
  const bool dummy_prefix = !pieces.empty() && pieces.front().starts_with("\xE2\x96\x81");
  return {{"tokenizer_class", "LlamaTokenizer"},
          {"legacy", false},
          {"add_prefix_space", dummy_prefix},
          {"add_bos_token", starts_with_bos},
          {"add_eos_token", false},
          {"bos_token", piece(processor.bos_id())},
          {"eos_token", piece(processor.eos_id())},
          {"unk_token", piece(processor.unk_id())},
          {"pad_token", piece(processor.eos_id())},
          {"clean_up_tokenization_spaces", false},
          {"model_max_length", max_length}};
}

}  // namespace

TokenizerFiles tokenizer_files(const std::string& path, bool starts_with_bos, int64_t max_length) {
  const Tokenizer tokenizer(path);
  const std::string model = read_input(path, ExitCode::kData);
  TokenizerFiles files{.texts = {}, .bos = tokenizer.bos(), .eos = tokenizer.eos()};
  if (!model.starts_with('{')) {
    files.texts["tokenizer.model"] = model;
    files.texts[kConfigName] =
        sentencepiece_config(model, path, starts_with_bos, max_length).dump(2) + "\n";
    return files;
  }
  files.texts["tokenizer.json"] = model;
  // The special tokens and the chat template, where the run has kept them.
  const fs::path config = fs::path(path).parent_path() / kConfigName;
  std::error_code unreadable;
  if (fs::exists(config, unreadable)) {
    files.texts[kConfigName] = read_input(config, ExitCode::kData);
  } else {
    files.texts[kConfigName] = ordered_json{{"tokenizer_class", "PreTrainedTokenizerFast"},
                                            {"clean_up_tokenization_spaces", false},
                                            {"model_max_length", max_length}}
                                   .dump(2) +
                               "\n";
  }
  return files;
}

}  // namespace sbtrain
