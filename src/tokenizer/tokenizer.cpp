#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "core/hugging_face_name.h"
#include "core/sha256.h"
#include "tokenizer/byte_level_bpe.h"
#include "tokenizer/sentencepiece_model.h"
#include "tokenizer/tokenizer_files.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr const char* kSentencePieceFile = "tokenizer.model";
constexpr const char* kJsonFile = "tokenizer.json";
constexpr const char* kTiktokenSuffix = ".tiktoken";

enum class Format { kSentencePiece, kJson, kTiktoken };

Format format_of(std::string_view content) {
  const size_t first = content.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && content[first] == '{') {
    const size_t second = content.find_first_not_of(" \t\r\n", first + 1);
    const char next = second == std::string_view::npos ? '\0' : content[second];
    if (next == '"' || next == '}') return Format::kJson;
  }
  return is_tiktoken(content) ? Format::kTiktoken : Format::kSentencePiece;
}

std::string read_tokenizer(const std::string& path) {
  std::string hint = hugging_face_hint(path);
  if (hint.empty()) hint = "; `sbtrain tokenizer train` makes a tokenizer's model from text";
  return read_input(path, ExitCode::kData, hint);
}

std::string fingerprint(const std::string& content, const std::string& path) {
  std::string hash = sha256_hex(content);
  if (format_of(content) != Format::kTiktoken || is_published_tiktoken(hash)) return hash;
  return sha256_hex(content + "\n" + tiktoken_encoding(hash, path));
}

std::string beside(const std::string& path, const char* name) {
  return (fs::path(path).parent_path() / name).string();
}

std::shared_ptr<const TokenizerModel> make_model(const std::string& content,
                                                 const std::string& path,
                                                 const TokenizerConfig& config, bool special) {
  switch (format_of(content)) {
    case Format::kJson:
      return std::make_shared<ByteLevelBpe>(read_tokenizer_json(content, path, config), special);
    case Format::kTiktoken: {
      const std::string encoding = tiktoken_encoding(sha256_hex(content), path);
      return std::make_shared<ByteLevelBpe>(read_tiktoken(content, encoding, path), special);
    }
    case Format::kSentencePiece:
      break;
  }
  return std::make_shared<SentencePieceModel>(content, path);
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path, const TokenizerOptions& options) : path_(path) {
  const std::string content = read_tokenizer(path);
  const std::string beside_it = beside(path, kConfigFile);
  const std::string settings = is_there(beside_it) ? read_input(beside_it, ExitCode::kData) : "";
  const TokenizerConfig config = read_tokenizer_config(settings, beside_it);
  model_ = make_model(content, path, config, options.special);
  vocabulary_ = &model_->vocabulary();
  adds_bos_ = config.add_bos.value_or(vocabulary_->adds_bos);
  hash_ = fingerprint(content, path);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const {
  while (!text.empty()) {
    const size_t bytes = first_chunk(text).bytes;
    model_->encode(text.substr(0, bytes), ids, continues);
    text.remove_prefix(bytes);
    continues = true;
  }
}

std::string_view Tokenizer::bytes(int32_t id) const {
  if (id < 0 || id >= size()) {
    fail(ExitCode::kData, "token {} is outside of the vocabulary of {} ({} pieces)", id, path_,
         size());
  }
  return vocabulary_->bytes[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes(id);
  return text;
}

std::string tokenizer_fingerprint(const std::string& path) {
  return fingerprint(read_tokenizer(path), path);
}

std::vector<TokenizerFile> tokenizer_files(const std::string& path) {
  const std::string content = read_tokenizer(path);
  std::string name = kSentencePieceFile;
  if (format_of(content) == Format::kJson) name = kJsonFile;
  if (format_of(content) == Format::kTiktoken) {
    name = tiktoken_encoding(sha256_hex(content), path) + kTiktokenSuffix;
  }
  std::vector<TokenizerFile> files = {{path, name}};
  for (const char* companion : {kConfigFile, "special_tokens_map.json", "chat_template.jinja"}) {
    if (is_there(beside(path, companion))) files.push_back({beside(path, companion), companion});
  }
  return files;
}

std::vector<std::string> find_tokenizers(const std::string& folder) {
  std::vector<std::string> files;
  for (const char* name : {kSentencePieceFile, kJsonFile}) {
    const std::string path = (fs::path(folder) / name).string();
    if (is_there(path)) files.push_back(path);
  }
  std::vector<std::string> ranks;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
    if (entry.path().extension() == kTiktokenSuffix) ranks.push_back(entry.path().string());
  }
  std::sort(ranks.begin(), ranks.end());
  files.insert(files.end(), ranks.begin(), ranks.end());
  return files;
}

std::string find_tokenizer(const std::string& folder) {
  const std::vector<std::string> files = find_tokenizers(folder);
  return files.empty() ? "" : files.front();
}

std::string tiktoken_as_json(const std::string& path, bool bos) {
  const std::string content = read_tokenizer(path);
  return tiktoken_as_json(content, tiktoken_encoding(sha256_hex(content), path), bos, path);
}

void check_vocabulary(const Tokenizer& tokenizer, int64_t vocab) {
  if (tokenizer.size() <= vocab) return;
  fail(ExitCode::kConfig,
       "{} has {} pieces, the model a vocabulary of {}: it is the tokenizer of another model",
       tokenizer.path(), tokenizer.size(), vocab);
}

}  // namespace sbtrain
