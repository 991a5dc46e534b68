// Readers of the tokenizer files that others write. Everything in them that changes tokens is
// either followed or refused by its name, with ExitCode::kData.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/byte_level_bpe.h"

namespace sbtrain {

// ---- What several of them share

// The pattern of Llama 3's tokenizer, which Hugging Face's library and tiktoken read alike: words
// with the space before them, numbers of up to three digits, signs, ends of lines, spaces.
inline constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

// GPT-2 writes bytes as characters: printable ones of Latin-1 as they are, the others, in order, as
// U+0100 and on. The character of each byte, in UTF-8.
std::array<std::string, 256> byte_characters();

// The ids that a file of this content may have, from 0 on. A vocabulary takes memory for every id
// up to the largest, so a short file cannot have large ones.
inline int64_t most_ids(std::string_view content) {
  return std::min<int64_t>(1 << 24, (1 << 18) + static_cast<int64_t>(content.size()));
}

// ---- tokenizer_config.json beside a tokenizer

// What it says; nothing where a key is not there. A token that is null is an empty text.
struct TokenizerConfig {
  std::string path;  // for messages
  std::optional<std::string> bos, eos;
  std::optional<bool> add_bos;
};
// `content` is empty if there is no such file.
TokenizerConfig read_tokenizer_config(const std::string& content, const std::string& path);

// ---- tokenizer.json of Hugging Face's tokenizers

// Supported are byte-level BPE; the normaliser NFC; the pre-tokenizers ByteLevel, Split, Digits and
// sequences of them; added tokens with all their flags. `config` names bos and eos.
//
// Where it does not, bos and eos are what the post-processor puts around a text, and otherwise
// <|begin_of_text|> and <|end_of_text|>, <s> and </s>, or <|endoftext|> for eos alone, as far as
// they are special tokens of the file.
BpeDescription read_tokenizer_json(const std::string& content, const std::string& path,
                                   const TokenizerConfig& config);

// What a tokenizer.json is written from: a byte-level BPE whose texts are cut by one pattern.
struct TokenizerJson {
  std::vector<std::string> tokens{};                  // the bytes of each id; empty: no token
  std::vector<std::pair<int32_t, int32_t>> merges{};  // pairs of ids, by rank
  std::vector<AddedToken> added{};
  std::string pattern{};       // in Oniguruma's syntax
  bool nfc = false;            // normalisation form C
  bool ignore_merges = false;  // a piece that is a token becomes it, whatever the merges are
  std::string bos{};           // the added token that texts begin with; empty: none
};
// Throws ExitCode::kData for an added token whose id is not free for it in such a file.
std::string write_tokenizer_json(const TokenizerJson& tokenizer);

// ---- tiktoken: lines of base64 and a rank

// Whether `content` looks like such a file.
bool is_tiktoken(std::string_view content);

// The file does not hold its regular expression and special tokens; its encoding has a name for
// them, such as cl100k_base. The encoding of a published file is known by the file's SHA-256
// (`hash`), that of any other is what its name begins with: o200k_base.tiktoken. Throws if neither
// is known.
std::string tiktoken_encoding(const std::string& hash, const std::string& path);
// Whether it is known by the SHA-256.
bool is_published_tiktoken(const std::string& hash);

BpeDescription read_tiktoken(std::string_view content, const std::string& encoding,
                             const std::string& path);

// The same tokenizer as a tokenizer.json. tiktoken merges the pair whose bytes are the token of
// lowest rank; here the pairs of equal bytes follow each other. Pairs of equal bytes that overlap
// in a text are the only ones for which that order could differ from tiktoken's, the leftmost
// first.
// `bos`: texts begin with the encoding's bos, if it has one.
std::string tiktoken_as_json(std::string_view content, const std::string& encoding, bool bos,
                             const std::string& path);

}  // namespace sbtrain
