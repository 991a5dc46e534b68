// Byte-level byte-pair encoding, the tokenizer of GPT-2 and most models since. In order: added
// tokens are found, the text between them is normalised, cut into pieces by regular expressions,
// and each piece's bytes are merged to tokens.
//
// Invalid UTF-8, for which the originals have no tokens, is encoded byte by byte, so that decoding
// gives every text back that the model does not normalise.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/byte_pairs.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/tokenizer_model.h"

namespace sbtrain {

// What a tokenizer's file says.
struct BpeDescription {
  std::vector<std::string> bytes;  // of each token, without the added ones
  BytePairs::Description pairs;
  std::vector<AddedToken> added;
  std::vector<PreTokenizer::Stage> stages;
  bool nfc = false;  // normalisation form C
  int32_t bos = -1;
  int32_t eos = -1;
  int32_t unk = -1;
  bool adds_bos = false;  // a text begins with bos
};

class ByteLevelBpe : public TokenizerModel {
 public:
  // `special`: special tokens that are written in the text become their ids.
  ByteLevelBpe(BpeDescription description, bool special);

  const Vocabulary& vocabulary() const override { return vocabulary_; }
  void encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const override;
  TextChunk first_chunk(std::string_view text) const override;

 private:
  struct Scratch {
    MatchScratch match;
    BytePairs::Scratch pairs;
  };
  // Borrows a scratch for as long as it exists. There are as many as threads encode at a time.
  class Borrowed;

  // The end of a piece: in the text, and in the normalised text. One that normalisation has moved
  // to a place that the text does not have is kNowhere in the text.
  struct End {
    size_t text = 0;
    size_t normalized = 0;
    bool operator==(const End& other) const = default;
  };
  static constexpr size_t kNowhere = ~size_t{0};
  // Called with a token that is found as it is written, or with -1 and a piece to be merged.
  using Visit = std::function<void(int32_t id, std::string_view piece, End end)>;
  // Visits the pieces of a text in order. `open`: more text follows that is not given; only pieces
  // that it cannot change are visited.
  void visit_pieces(std::string_view text, bool open, Scratch& scratch, const Visit& visit) const;
  class Walk;

  std::vector<End> ends(std::string_view text, bool open) const;

  Vocabulary vocabulary_;
  std::array<int32_t, 256> byte_ids_;
  BytePairs pairs_;
  AddedTokens raw_added_;         // found before normalisation
  AddedTokens normalized_added_;  // found after it
  PreTokenizer pre_tokenizer_;
  bool nfc_;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> free_;
};

}  // namespace sbtrain
