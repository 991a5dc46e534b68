// Readers of the tokenizer files that others write. Everything in them that changes tokens is
// either followed or refused by its name, with ExitCode::kData.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "data/byte_level_bpe.h"

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

}  // namespace sbtrain
