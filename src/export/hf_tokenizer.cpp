#include "export/hf_tokenizer.h"

#include <sentencepiece_processor.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
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

// A tokenizer.json. Its own special tokens say which are bos and eos.
ordered_json json_config(const Tokenizer& tokenizer, bool starts_with_bos, int64_t max_length) {
  ordered_json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                         {"add_bos_token", starts_with_bos},
                         {"clean_up_tokenization_spaces", false},
                         {"model_max_length", max_length}};
  const auto name = [&](const char* key, int32_t id) {
    for (const auto& [content, special] : tokenizer.special()) {
      if (special == id) config[key] = content;
    }
  };
  name("bos_token", tokenizer.bos());
  name("eos_token", tokenizer.eos());
  name("pad_token", tokenizer.eos());
  return config;
}

// The configuration of tiktoken's ranks, of which transformers reads the tokenizer.json. A
// configuration that was kept with the ranks names a class for them instead, whose code is not
// here; its chat template is that of the model.
ordered_json tiktoken_config(const Tokenizer& tokenizer, const ordered_json& kept,
                             const HfTokenizerOptions& options) {
  ordered_json config = json_config(tokenizer, options.starts_with_bos, options.max_length);
  if (kept.contains("chat_template")) config["chat_template"] = kept["chat_template"];
  return config;
}

}  // namespace

HfTokenizer hf_tokenizer(const std::string& path, const HfTokenizerOptions& options) {
  const Tokenizer tokenizer(path);
  check_vocabulary(tokenizer, options.vocab);
  HfTokenizer result{
      .texts = {}, .bos = tokenizer.bos(), .eos = tokenizer.eos(), .hash = tokenizer.hash()};
  const std::vector<TokenizerFile> files = tokenizer_files(path);
  for (const TokenizerFile& file : files) {
    result.texts[file.name] = read_input(file.path, ExitCode::kData);
  }
  const std::string& model = files.front().name;
  ordered_json config = ordered_json::object();
  const auto kept = result.texts.find(kConfigName);
  if (kept != result.texts.end()) {
    config = ordered_json::parse(kept->second, nullptr, /*allow_exceptions=*/false);
    if (!config.is_object()) fail(ExitCode::kData, "{}: {} is no JSON object", path, kConfigName);
    config["add_bos_token"] = options.starts_with_bos;
  }
  if (model.ends_with(".tiktoken")) {
    result.texts["tokenizer.json"] = tiktoken_as_json(path, options.starts_with_bos);
    config = tiktoken_config(tokenizer, config, options);
  } else if (kept == result.texts.end()) {
    config = model == "tokenizer.model"
                 ? sentencepiece_config(result.texts[model], path, options.starts_with_bos,
                                        options.max_length)
                 : json_config(tokenizer, options.starts_with_bos, options.max_length);
  }
  result.texts[kConfigName] = config.dump(2) + "\n";
  return result;
}

}  // namespace sbtrain
