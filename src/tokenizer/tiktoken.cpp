#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "tokenizer/tokenizer_files.h"

namespace sbtrain {
namespace {

// ---- Encodings

// Patterns of tiktoken's openai_public.py, of Llama 3's and Qwen's tokenizers, written so that
// Oniguruma reads them alike: {1,3}+ is not possessive there and matches the same text here without
// the +, and $ stands at the end of each line there, where \s++(?!\S) is what \s++$ means.
constexpr const char* kGpt2Pattern =
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++(?!\S)|\s+(?!\S)|\s)";
constexpr const char* kCl100kPattern =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|)"
    R"(\s++(?!\S)|\s*[\r\n]|\s+(?!\S)|\s)";
constexpr const char* kO200kPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|)"
    R"(\s+(?!\S)|\s+)";
constexpr const char* kQwenPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

struct SpecialToken {
  const char* content;
  int32_t id;
};
using SpecialTokens = std::vector<std::pair<std::string, int32_t>>;

// Llama 3 has 256 special tokens after its ranks; the names are those of its tokenizer.json.
SpecialTokens llama3_specials(int32_t ranks) {
  constexpr std::array<SpecialToken, 8> kNamed = {{{"<|begin_of_text|>", 0},
                                                   {"<|end_of_text|>", 1},
                                                   {"<|finetune_right_pad_id|>", 4},
                                                   {"<|start_header_id|>", 6},
                                                   {"<|end_header_id|>", 7},
                                                   {"<|eom_id|>", 8},
                                                   {"<|eot_id|>", 9},
                                                   {"<|python_tag|>", 10}}};
  SpecialTokens tokens;
  int reserved = 0;
  for (int32_t i = 0; i < 256; ++i) {
    const auto* named = std::find_if(kNamed.begin(), kNamed.end(),
                                     [&](const SpecialToken& token) { return token.id == i; });
    tokens.emplace_back(named != kNamed.end()
                            ? named->content
                            : fmt::format("<|reserved_special_token_{}|>", reserved++),
                        ranks + i);
  }
  return tokens;
}

struct Encoding {
  const char* name;
  const char* pattern;
  std::vector<const char*> hashes;  // SHA-256 of the published files
  std::vector<SpecialToken> specials;
  const char* bos;
  const char* eos;
  bool nfc = false;
};

const std::vector<Encoding>& encodings() {
  static const std::vector<Encoding> kEncodings = {
      {.name = "r50k_base",
       .pattern = kGpt2Pattern,
       .hashes = {"306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"},
       .specials = {{"<|endoftext|>", 50256}},
       .bos = nullptr,
       .eos = "<|endoftext|>"},
      {.name = "gpt2",
       .pattern = kGpt2Pattern,
       .hashes = {},
       .specials = {{"<|endoftext|>", 50256}},
       .bos = nullptr,
       .eos = "<|endoftext|>"},
      {.name = "p50k_base",
       .pattern = kGpt2Pattern,
       .hashes = {"94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"},
       .specials = {{"<|endoftext|>", 50256}},
       .bos = nullptr,
       .eos = "<|endoftext|>"},
      {.name = "cl100k_base",
       .pattern = kCl100kPattern,
       .hashes = {"223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"},
       .specials = {{"<|endoftext|>", 100257},
                    {"<|fim_prefix|>", 100258},
                    {"<|fim_middle|>", 100259},
                    {"<|fim_suffix|>", 100260},
                    {"<|endofprompt|>", 100276}},
       .bos = nullptr,
       .eos = "<|endoftext|>"},
      {.name = "o200k_base",
       .pattern = kO200kPattern,
       .hashes = {"446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"},
       .specials = {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}},
       .bos = nullptr,
       .eos = "<|endoftext|>"},
      {.name = "llama3",
       .pattern = kLlama3Pattern,
       .hashes = {"82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"},
       .specials = {},  // llama3_specials
       .bos = "<|begin_of_text|>",
       .eos = "<|end_of_text|>"},
      {.name = "qwen",
       .pattern = kQwenPattern,
       .hashes = {"b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"},
       .specials = {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}},
       .bos = nullptr,
       .eos = "<|endoftext|>",
       .nfc = true},
  };
  return kEncodings;
}

const Encoding* known_by_hash(const std::string& hash) {
  for (const Encoding& encoding : encodings()) {
    for (const char* known : encoding.hashes) {
      if (hash == known) return &encoding;
    }
  }
  return nullptr;
}

const Encoding* known_by_name(const std::string& name) {
  for (const Encoding& encoding : encodings()) {
    if (name == encoding.name) return &encoding;
  }
  return nullptr;
}

// ---- The file

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// The bytes of base64 with padding (RFC 4648); nothing if it is not valid or empty.
std::string base64_bytes(std::string_view text) {
  if (text.size() % 4 != 0) return "";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  const size_t padding = text.size() - std::min(text.find('='), text.size());
  if (padding > 2) return "";
  for (const char c : text.substr(0, text.size() - padding)) {
    const int value = base64_value(c);
    if (value < 0) return "";
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) bytes += static_cast<char>(bits >> (count -= 8) & 0xff);
  }
  return text.substr(text.size() - padding) == std::string(padding, '=') ? bytes : "";
}

constexpr size_t kLongestLine = 4096;

struct RankLine {
  std::string bytes;
  int32_t rank = -1;
};

// A line without its end; rank -1 if it is not one.
RankLine parse_line(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const size_t space = line.find(' ');
  if (space == std::string_view::npos) return {};
  RankLine result{.bytes = base64_bytes(line.substr(0, space)), .rank = -1};
  const std::string_view digits = line.substr(space + 1);
  int32_t rank = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error == std::errc() && end == digits.data() + digits.size() && !result.bytes.empty()) {
    result.rank = rank;
  }
  return result;
}

using Ranks = std::unordered_map<std::string, int32_t>;

Ranks read_ranks(std::string_view content, const std::string& path) {
  const int64_t most = most_ids(content);
  Ranks ranks;
  std::vector<bool> seen;
  for (int64_t number = 1; !content.empty(); ++number) {
    const size_t length = std::min(content.find('\n'), content.size());
    const RankLine line =
        length > kLongestLine ? RankLine{} : parse_line(content.substr(0, length));
    content.remove_prefix(std::min(content.size(), length + 1));
    if (length == 0) continue;
    if (line.rank < 0 || line.rank >= most) {
      fail(ExitCode::kData, "{}, line {}: not the base64 of a token and its rank", path, number);
    }
    const auto rank = static_cast<size_t>(line.rank);
    if (rank >= seen.size()) seen.resize(rank + 1);
    if (seen[rank] || !ranks.emplace(line.bytes, line.rank).second) {
      fail(ExitCode::kData, "{}, line {}: this token or its rank stands there twice", path, number);
    }
    seen[rank] = true;
  }
  return ranks;
}

// tiktoken merges the adjacent parts whose bytes together are the token of lowest rank. As each
// part is a token itself, these are the pairs of tokens that make up a token.
std::vector<BytePairs::Merge> merges_of(const Ranks& ranks) {
  std::vector<BytePairs::Merge> merges;
  for (const auto& [bytes, rank] : ranks) {
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = ranks.find(bytes.substr(0, cut));
      if (left == ranks.end()) continue;
      const auto right = ranks.find(bytes.substr(cut));
      if (right == ranks.end()) continue;
      merges.push_back({left->second, right->second, rank, rank});
    }
  }
  return merges;
}

SpecialTokens specials_of(const Encoding& encoding, int32_t ranks) {
  if (encoding.name == std::string("llama3")) return llama3_specials(ranks);
  SpecialTokens tokens;
  for (const SpecialToken& token : encoding.specials) tokens.emplace_back(token.content, token.id);
  return tokens;
}

}  // namespace

bool is_tiktoken(std::string_view content) {
  const size_t end = content.substr(0, kLongestLine).find('\n');
  return end != std::string_view::npos && parse_line(content.substr(0, end)).rank >= 0;
}

bool is_published_tiktoken(const std::string& hash) {
  return known_by_hash(hash) != nullptr;
}

std::string tiktoken_encoding(const std::string& hash, const std::string& path) {
  if (const Encoding* encoding = known_by_hash(hash)) return encoding->name;
  const std::string file = std::filesystem::path(path).filename().string();
  std::string name = file.substr(0, file.find('.'));
  if (known_by_name(name) != nullptr) return name;
  std::string names;
  for (const Encoding& encoding : encodings()) {
    names += (names.empty() ? "" : ", ") + std::string(encoding.name);
  }
  fail(ExitCode::kData,
       "{}: a tiktoken file does not hold its regular expression and special tokens, and this one "
       "is "
       "not among the published ones: name it after its encoding ({}), such as llama3.tiktoken",
       path, names);
}

BpeDescription read_tiktoken(std::string_view content, const std::string& encoding_name,
                             const std::string& path) {
  const Encoding* encoding = known_by_name(encoding_name);
  require(encoding != nullptr, "no tiktoken encoding {}", encoding_name);
  Ranks ranks = read_ranks(content, path);
  BpeDescription d;
  int32_t count = 0;
  for (const auto& [bytes, rank] : ranks) count = std::max(count, rank + 1);
  d.bytes.resize(static_cast<size_t>(count));
  for (const auto& [bytes, rank] : ranks) d.bytes[static_cast<size_t>(rank)] = bytes;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ranks.find(std::string(1, static_cast<char>(byte)));
    if (found == ranks.end()) fail(ExitCode::kData, "{}: no token for the byte {}", path, byte);
    d.pairs.byte_ids[static_cast<size_t>(byte)] = found->second;
  }
  d.pairs.merges = merges_of(ranks);
  for (const auto& [name, id] : specials_of(*encoding, count)) {
    if (id < count && !d.bytes[static_cast<size_t>(id)].empty()) {
      fail(ExitCode::kData, "{}: id {} is a token here and {} in the encoding {}", path, id, name,
           encoding->name);
    }
    if (encoding->bos != nullptr && name == encoding->bos) d.bos = id;
    if (encoding->eos != nullptr && name == encoding->eos) d.eos = id;
    d.added.push_back({.content = name, .id = id, .special = true});
  }
  d.pairs.whole_pieces = std::move(ranks);
  d.nfc = encoding->nfc;
  d.stages.push_back({.pattern = SplitPattern(encoding->pattern, SplitPattern::Syntax::kRust, path),
                      .keep_rest = true});
  return d;
}

std::string tiktoken_as_json(std::string_view content, const std::string& encoding, bool bos,
                             const std::string& path) {
  BpeDescription d = read_tiktoken(content, encoding, path);
  std::vector<BytePairs::Merge>& merges = d.pairs.merges;
  std::sort(merges.begin(), merges.end(), [](const auto& a, const auto& b) {
    return std::tie(a.rank, a.left, a.right) < std::tie(b.rank, b.left, b.right);
  });
  TokenizerJson tokenizer{.tokens = std::move(d.bytes),
                          .added = std::move(d.added),
                          .pattern = known_by_name(encoding)->pattern,
                          .nfc = d.nfc,
                          .ignore_merges = true};
  const char* first = known_by_name(encoding)->bos;
  if (bos && first != nullptr) tokenizer.bos = first;
  for (const auto& merge : merges) tokenizer.merges.emplace_back(merge.left, merge.right);
  return write_tokenizer_json(tokenizer);
}

}  // namespace sbtrain
