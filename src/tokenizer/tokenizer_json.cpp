#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "tokenizer/tokenizer_files.h"

namespace sbtrain {
namespace {

using Json = nlohmann::json;

// GPT-2's own pattern, which ByteLevel applies with use_regex.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Published tokenizers split a text by up to five patterns, one after the other.
constexpr size_t kMostStages = 64;

// Every place of a text may have to be compared with all of an added token.
constexpr size_t kLongestAdded = 1024;

// -1: there is no such special token.
int32_t special_id(const BpeDescription& d, std::string_view content) {
  for (const AddedToken& token : d.added) {
    if (token.content == content && token.special) return token.id;
  }
  return -1;
}

class Reader {
 public:
  Reader(const std::string& path, std::string_view content)
      : path_(path), most_ids_(most_ids(content)) {
    try {
      root_ = Json::parse(content);
    } catch (const Json::exception& error) {
      fail(ExitCode::kData, "{}: not a tokenizer.json: {}", path, error.what());
    }
    for (int byte = 0; byte < 256; ++byte) {
      bytes_of_characters_.emplace(characters_[static_cast<size_t>(byte)], static_cast<char>(byte));
    }
  }

  BpeDescription read() {
    if (!root_.is_object() || !root_.contains("model")) {
      fail(ExitCode::kData, "{}: not a tokenizer.json: it has no \"model\"", path_);
    }
    read_normalizer(member(root_, "normalizer"));
    read_pre_tokenizer(member(root_, "pre_tokenizer"), "pre_tokenizer");
    if (!byte_level_) refuse("a pre_tokenizer without ByteLevel");
    read_decoder(member(root_, "decoder"));
    read_model(root_["model"]);
    read_added_tokens(member(root_, "added_tokens"));
    read_post_processor(member(root_, "post_processor"), "post_processor");
    return std::move(d_);
  }

 private:
  static const Json& member(const Json& object, const char* key) {
    static const Json kNull;
    const auto found = object.find(key);
    return found == object.end() ? kNull : *found;
  }
  [[noreturn]] void refuse(const std::string& what) const {
    fail(ExitCode::kData, "{}: {} is not supported", path_, what);
  }
  [[noreturn]] void damaged(const std::string& what) const {
    fail(ExitCode::kData, "{}: {}", path_, what);
  }
  std::string type_of(const Json& component, const std::string& where) const {
    const Json& type = component.is_object() ? member(component, "type") : component;
    if (!type.is_string()) damaged(where + " has no \"type\"");
    return type.get<std::string>();
  }
  // Nobody nests sequences, and the depth of the calls here is thus bounded.
  void require_flat(const Json& part) const {
    if (part.is_object() && member(part, "type") == "Sequence") refuse("a Sequence in a Sequence");
  }
  bool flag(const Json& object, const char* key, bool absent) const {
    const Json& value = member(object, key);
    if (value.is_null()) return absent;
    if (!value.is_boolean()) damaged(fmt::format("\"{}\" is neither true nor false", key));
    return value.get<bool>();
  }
  const Json& list(const Json& object, const char* key, const std::string& where) const {
    const Json& value = member(object, key);
    if (!value.is_array()) damaged(fmt::format("{}: \"{}\" is not a list", where, key));
    return value;
  }

  void read_normalizer(const Json& normalizer) {
    if (normalizer.is_null()) return;
    const std::string type = type_of(normalizer, "normalizer");
    if (type == "Sequence") {
      for (const Json& part : list(normalizer, "normalizers", "normalizer")) {
        require_flat(part);
        read_normalizer(part);
      }
    } else if (type == "NFC") {
      d_.nfc = true;
    } else {
      refuse("the normalizer " + type);
    }
  }

  // Every stage goes through the whole text, in a call of its own.
  void add_stage(const std::string& pattern, bool keep_rest, const std::string& where) {
    if (d_.stages.size() == kMostStages) refuse(fmt::format("more than {} splits", kMostStages));
    d_.stages.push_back(
        {.pattern = SplitPattern(pattern, SplitPattern::Syntax::kOniguruma, path_ + ": " + where),
         .keep_rest = keep_rest});
  }

  void read_pre_tokenizer(const Json& component, const std::string& where) {
    if (component.is_null()) return;
    const std::string type = type_of(component, where);
    // After ByteLevel the text consists of other characters, which no pattern here knows.
    if (byte_level_) refuse("a pre_tokenizer after ByteLevel");
    if (type == "Sequence") {
      for (const Json& part : list(component, "pretokenizers", where)) {
        require_flat(part);
        read_pre_tokenizer(part, where);
      }
    } else if (type == "ByteLevel") {
      if (flag(component, "add_prefix_space", true)) {
        refuse("the pre_tokenizer ByteLevel with add_prefix_space");
      }
      if (flag(component, "use_regex", true)) add_stage(kGpt2Pattern, true, where);
      byte_level_ = true;
    } else if (type == "Digits") {
      add_stage(flag(component, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", true,
                where);
    } else if (type == "Split") {
      read_split(component, where);
    } else {
      refuse("the pre_tokenizer " + type);
    }
  }

  void read_split(const Json& split, const std::string& where) {
    const Json& pattern = member(split, "pattern");
    const bool regex = pattern.is_object() && member(pattern, "Regex").is_string();
    const Json& text = regex ? pattern["Regex"] : member(pattern, "String");
    if (!pattern.is_object() || !text.is_string()) damaged(where + ": Split has no pattern");
    const std::string behavior = type_of(member(split, "behavior"), where + ": Split's behavior");
    const bool invert = flag(split, "invert", false);
    const bool removed = behavior == "Removed";
    if (behavior != "Isolated" && !(removed && invert)) {
      refuse(fmt::format("the pre_tokenizer Split with behavior {}{}", behavior,
                         invert ? ", inverted" : ""));
    }
    add_stage(regex ? text.get<std::string>() : literal(text.get<std::string>()), !removed, where);
  }

  // A pattern that matches `text` alone.
  static std::string literal(const std::string& text) {
    std::string pattern;
    for (const char c : text) {
      if (std::ispunct(static_cast<unsigned char>(c)) != 0) pattern += '\\';
      pattern += c;
    }
    return pattern;
  }

  void read_decoder(const Json& decoder) {
    const std::string type = decoder.is_null() ? "null" : type_of(decoder, "decoder");
    if (type == "Sequence") {
      const Json& parts = list(decoder, "decoders", "decoder");
      if (parts.size() == 1) {
        require_flat(parts.front());
        return read_decoder(parts.front());
      }
    }
    if (type != "ByteLevel") refuse("the decoder " + type);
  }

  // The bytes that a token's characters stand for; false if one of them stands for none.
  bool to_bytes(std::string_view token, std::string& bytes) const {
    bytes.clear();
    while (!token.empty()) {
      const size_t length = std::max<size_t>(character_length(token), 1);
      const auto found = bytes_of_characters_.find(std::string(token.substr(0, length)));
      if (found == bytes_of_characters_.end()) return false;
      bytes += found->second;
      token.remove_prefix(length);
    }
    return true;
  }

  void read_model(const Json& model) {
    if (!model.is_object()) damaged("\"model\" is not an object");
    const std::string type = type_of(model, "model");
    if (type != "BPE") refuse("the model " + type);
    if (!member(model, "dropout").is_null() && member(model, "dropout") != 0.0) {
      refuse("the model's dropout");
    }
    for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = member(model, affix);
      if (!value.is_null() && value != Json("")) refuse(fmt::format("the model's {}", affix));
    }
    if (flag(model, "byte_fallback", false)) refuse("the model's byte_fallback");
    read_vocabulary(member(model, "vocab"), flag(model, "ignore_merges", false));
    read_merges(list(model, "merges", "model"));
  }

  int32_t read_id(const Json& value, std::string_view token) const {
    const bool in_range = value.is_number_integer() && value.get<double>() >= 0 &&
                          value.get<double>() < static_cast<double>(most_ids_);
    if (!in_range) {
      damaged(fmt::format("the id of {:.40} is not an integer from 0 to {}", token, most_ids_ - 1));
    }
    return value.get<int32_t>();
  }

  void read_vocabulary(const Json& vocabulary, bool ignore_merges) {
    if (!vocabulary.is_object()) damaged("the model's \"vocab\" is not an object");
    std::string bytes;
    std::vector<bool> seen;
    for (const auto& [token, value] : vocabulary.items()) {
      const int32_t id = read_id(value, token);
      const auto at = static_cast<size_t>(id);
      if (at >= d_.bytes.size()) {
        d_.bytes.resize(at + 1);
        seen.resize(at + 1);
      }
      if (seen[at]) damaged(fmt::format("two tokens have the id {}", id));
      seen[at] = true;
      ids_.emplace(token, id);
      const bool from_bytes = to_bytes(token, bytes);
      d_.bytes[at] = from_bytes ? bytes : token;
      if (from_bytes && ignore_merges) d_.pairs.whole_pieces.emplace(bytes, id);
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto found = ids_.find(characters_[byte]);
      if (found == ids_.end())
        damaged(fmt::format("the vocabulary has no token for byte {}", byte));
      d_.pairs.byte_ids[byte] = found->second;
    }
  }

  // "left right", or ["left", "right"].
  void read_merges(const Json& merges) {
    int32_t rank = 0;
    for (const Json& merge : merges) {
      std::string left;
      std::string right;
      if (merge.is_string()) {
        const auto text = merge.get<std::string>();
        const size_t space = text.find(' ');
        left = text.substr(0, space);
        if (space != std::string::npos) right = text.substr(space + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      }
      const auto left_id = ids_.find(left);
      const auto right_id = ids_.find(right);
      const auto result = ids_.find(left + right);
      if (left_id == ids_.end() || right_id == ids_.end() || result == ids_.end()) {
        damaged(
            fmt::format("merge {} is not two tokens of the vocabulary that form a third", rank));
      }
      d_.pairs.merges.push_back({left_id->second, right_id->second, rank++, result->second});
    }
  }

  void read_added_tokens(const Json& tokens) {
    if (tokens.is_null()) return;
    if (!tokens.is_array()) damaged("\"added_tokens\" is not a list");
    for (const Json& entry : tokens) {
      if (!entry.is_object() || !member(entry, "content").is_string()) {
        damaged("an added token has no \"content\"");
      }
      const auto content = entry["content"].get<std::string>();
      const AddedToken token{.content = content,
                             .id = read_id(member(entry, "id"), content),
                             .special = flag(entry, "special", false),
                             .single_word = flag(entry, "single_word", false),
                             .lstrip = flag(entry, "lstrip", false),
                             .rstrip = flag(entry, "rstrip", false),
                             .normalized = flag(entry, "normalized", true)};
      if (content.empty()) continue;
      if (content.size() > kLongestAdded) {
        refuse(fmt::format("an added token of more than {} bytes", kLongestAdded));
      }
      const auto in_vocabulary = ids_.find(content);
      const bool taken = static_cast<size_t>(token.id) < d_.bytes.size() &&
                         !d_.bytes[static_cast<size_t>(token.id)].empty();
      if (in_vocabulary != ids_.end() ? in_vocabulary->second != token.id : taken) {
        damaged(fmt::format("the added token {:.40} and the vocabulary do not agree on its id {}",
                            content, token.id));
      }
      check_unique(token);
      d_.added.push_back(token);
    }
  }

  // One id stands for one content among the added tokens, too.
  void check_unique(const AddedToken& token) {
    const int32_t id = added_ids_.emplace(token.content, token.id).first->second;
    const std::string& content = added_contents_.emplace(token.id, token.content).first->second;
    if (id != token.id) {
      damaged(fmt::format("the added token {:.40} has two ids, {} and {}", token.content, id,
                          token.id));
    }
    if (content != token.content) {
      damaged(fmt::format("the added tokens {:.40} and {:.40} have the same id {}", content,
                          token.content, id));
    }
  }

  // Post-processors put special tokens around a text. sbtrain does that itself, where it wants
  // them, so only those are supported that do nothing else.
  void read_post_processor(const Json& component, const std::string& where) {
    if (component.is_null()) return;
    const std::string type = type_of(component, where);
    if (type == "Sequence") {
      for (const Json& part : list(component, "processors", where)) {
        require_flat(part);
        read_post_processor(part, where);
      }
    } else if (type == "TemplateProcessing") {
      read_template(list(component, "single", where));
    } else if (type != "ByteLevel") {
      refuse("the post_processor " + type);
    }
  }

  void read_template(const Json& items) {
    bool before = true;
    for (const Json& item : items) {
      if (!item.is_object()) damaged("post_processor: TemplateProcessing has an unknown item");
      if (!member(item, "Sequence").is_null()) before = false;
      const Json& token = member(item, "SpecialToken");
      if (!token.is_object() || !member(token, "id").is_string()) continue;
      if (before) d_.adds_bos = true;
      int32_t& id = before ? d_.bos : d_.eos;
      if (id < 0) id = special_id(d_, token["id"].get<std::string>());
    }
  }

  std::string path_;
  const int64_t most_ids_;
  Json root_;
  const std::array<std::string, 256> characters_ = byte_characters();
  std::unordered_map<std::string, char> bytes_of_characters_;
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<std::string, int32_t> added_ids_;
  std::unordered_map<int32_t, std::string> added_contents_;
  bool byte_level_ = false;
  BpeDescription d_;
};

// The id of a token that tokenizer_config.json names.
int32_t configured_token(const BpeDescription& d, const TokenizerConfig& config, const char* key,
                         const std::string& content) {
  if (content.empty()) return -1;
  for (const AddedToken& token : d.added) {
    if (token.content == content) return token.id;
  }
  fail(ExitCode::kData, "{}: {} is {:.40}, which the tokenizer.json beside it does not have",
       config.path, key, content);
}

void guess_bos_and_eos(BpeDescription& d) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kUsual = {
      {{"<|begin_of_text|>", "<|end_of_text|>"}, {"<s>", "</s>"}, {"", "<|endoftext|>"}}};
  for (const auto& [bos, eos] : kUsual) {
    const int32_t end = special_id(d, eos);
    if (end < 0) continue;
    if (d.bos < 0) d.bos = special_id(d, bos);
    if (d.eos < 0) d.eos = end;
    return;
  }
}

}  // namespace

std::array<std::string, 256> byte_characters() {
  std::array<std::string, 256> characters;
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
                           (byte >= 0xae && byte <= 0xff);
    const int code = printable ? byte : next++;
    std::string& text = characters[static_cast<size_t>(byte)];
    if (code < 0x80) {
      text = static_cast<char>(code);
    } else {
      text = {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
    }
  }
  return characters;
}

TokenizerConfig read_tokenizer_config(const std::string& content, const std::string& path) {
  TokenizerConfig config{.path = path, .bos = {}, .eos = {}, .add_bos = {}};
  if (content.empty()) return config;
  const Json settings = Json::parse(content, nullptr, /*allow_exceptions=*/false);
  if (!settings.is_object()) fail(ExitCode::kData, "{}: not a JSON object", path);
  // As a text, or as an object that describes an added token.
  const auto token = [&](const char* key, std::optional<std::string>& content_of) {
    const auto found = settings.find(key);
    if (found == settings.end()) return;
    const Json& value =
        found->is_object() && found->contains("content") ? (*found)["content"] : *found;
    if (!value.is_null() && !value.is_string())
      fail(ExitCode::kData, "{}: {} is not a string", path, key);
    content_of = value.is_null() ? "" : value.get<std::string>();
  };
  token("bos_token", config.bos);
  token("eos_token", config.eos);
  const auto add_bos = settings.find("add_bos_token");
  if (add_bos != settings.end() && add_bos->is_boolean()) config.add_bos = add_bos->get<bool>();
  return config;
}

BpeDescription read_tokenizer_json(const std::string& content, const std::string& path,
                                   const TokenizerConfig& config) {
  BpeDescription d = Reader(path, content).read();
  guess_bos_and_eos(d);
  if (config.bos) d.bos = configured_token(d, config, "bos_token", *config.bos);
  if (config.eos) d.eos = configured_token(d, config, "eos_token", *config.eos);
  return d;
}

}  // namespace sbtrain
