// What each kind of tokenizer file provides to Tokenizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// The first chunk of a text that is encoded in chunks.
struct TextChunk {
  size_t bytes = 0;   // its length
  bool exact = true;  // the cut does not change the tokens of the text
};

struct Vocabulary {
  // The bytes that each token stands for; empty for special tokens and for ids without a token.
  std::vector<std::string> bytes;
  std::map<std::string, int32_t, std::less<>> special;  // special tokens by their content
  int32_t bos = -1;                                     // -1: none
  int32_t eos = -1;
  int32_t unk = -1;
  bool adds_bos = false;  // the file itself says that a text begins with bos
  // Why decode(encode(x)) == x does not hold for every x, as a predicate such as "normalises text";
  // empty if it does.
  std::string flaw;
};

class TokenizerModel {
 public:
  virtual ~TokenizerModel() = default;
  virtual const Vocabulary& vocabulary() const = 0;
  // Appends the tokens of a text, of about kChunkBytes at most, to `ids`. `continues` as in
  // Tokenizer::encode. Thread-safe.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const = 0;
  // Where to cut a text of more than kChunkBytes, see Tokenizer::first_chunk.
  virtual TextChunk first_chunk(std::string_view text) const = 0;

  static constexpr size_t kChunkBytes = size_t{256} << 10;
};

}  // namespace sbtrain
