#include <nlohmann/json.hpp>

#include "core/error.h"
#include "tokenizer/tokenizer_files.h"

namespace sbtrain {
namespace {

using Json = nlohmann::json;

// The names of tokens in the file: each byte as a character.
std::vector<std::string> token_names(const std::vector<std::string>& tokens) {
  const std::array<std::string, 256> characters = byte_characters();
  std::vector<std::string> names(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    for (const char c : tokens[id]) names[id] += characters[static_cast<unsigned char>(c)];
  }
  return names;
}

// Hugging Face's library numbers added tokens on from the vocabulary, whatever ids they have in the
// file. It keeps the ids of those that are in the vocabulary as well.
bool number_on(const TokenizerJson& tokenizer) {
  size_t next = 0;
  for (const std::string& token : tokenizer.tokens) {
    if (token.empty()) return false;
    ++next;
  }
  return std::all_of(tokenizer.added.begin(), tokenizer.added.end(), [&](const AddedToken& token) {
    return static_cast<size_t>(token.id) == next++;
  });
}

Json vocabulary(const TokenizerJson& tokenizer, const std::vector<std::string>& names) {
  Json vocabulary = Json::object();
  for (size_t id = 0; id < names.size(); ++id) {
    if (!names[id].empty()) vocabulary[names[id]] = id;
  }
  if (number_on(tokenizer)) return vocabulary;
  for (const AddedToken& token : tokenizer.added) {
    if (!vocabulary.emplace(token.content, token.id).second) {
      fail(ExitCode::kData,
           "{} is a token of text and a special one, for which a tokenizer.json has no form",
           token.content);
    }
  }
  return vocabulary;
}

Json added_tokens(const std::vector<AddedToken>& tokens) {
  Json list = Json::array();
  for (const AddedToken& token : tokens) {
    list.push_back({{"id", token.id},
                    {"content", token.content},
                    {"single_word", token.single_word},
                    {"lstrip", token.lstrip},
                    {"rstrip", token.rstrip},
                    {"normalized", token.normalized},
                    {"special", token.special}});
  }
  return list;
}

Json split(const std::string& pattern) {
  return {{"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"},
             {"pattern", {{"Regex", pattern}}},
             {"behavior", "Isolated"},
             {"invert", false}},
            {{"type", "ByteLevel"},
             {"add_prefix_space", false},
             {"trim_offsets", true},
             {"use_regex", false}}}}};
}

// What the library puts around a text on request.
Json post_processor(const TokenizerJson& tokenizer) {
  const auto bos =
      std::find_if(tokenizer.added.begin(), tokenizer.added.end(),
                   [&](const AddedToken& token) { return token.content == tokenizer.bos; });
  if (bos == tokenizer.added.end()) return nullptr;
  const auto text = [](const char* id, int type) {
    return Json{{"Sequence", {{"id", id}, {"type_id", type}}}};
  };
  const Json first = {{"SpecialToken", {{"id", bos->content}, {"type_id", 0}}}};
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({first, text("A", 0)})},
          {"pair", Json::array({first, text("A", 0), text("B", 1)})},
          {"special_tokens",
           {{bos->content,
             {{"id", bos->content},
              {"ids", Json::array({bos->id})},
              {"tokens", Json::array({bos->content})}}}}}};
}

}  // namespace

std::string write_tokenizer_json(const TokenizerJson& tokenizer) {
  const std::vector<std::string> names = token_names(tokenizer.tokens);
  Json merges = Json::array();
  for (const auto& [left, right] : tokenizer.merges) {
    merges.push_back({names[static_cast<size_t>(left)], names[static_cast<size_t>(right)]});
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", true},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  const Json file = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added_tokens(tokenizer.added)},
                     {"normalizer", tokenizer.nfc ? Json{{"type", "NFC"}} : Json()},
                     {"pre_tokenizer", split(tokenizer.pattern)},
                     {"post_processor", post_processor(tokenizer)},
                     {"decoder", byte_level},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", tokenizer.ignore_merges},
                       {"vocab", vocabulary(tokenizer, names)},
                       {"merges", merges}}}};
  return file.dump(1) + "\n";
}

}  // namespace sbtrain
