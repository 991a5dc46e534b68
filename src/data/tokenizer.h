// Converts text to token ids and back with sentencepiece (Kudo and Richardson, arXiv 1808.06226).
//
// Models trained here are byte-fallback BPE without normalisation: decode(encode(x)) == x for
// every string of bytes x, newlines, tabs and invalid UTF-8 included.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace sbtrain {

class Tokenizer {
 public:
  // Loads a sentencepiece model file. Throws ExitCode::kData.
  explicit Tokenizer(const std::string& path);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Thread-safe. Adds no bos or eos. Working memory does not grow with the text: a text of more
  // than kPartBytes is encoded in parts.
  std::vector<int32_t> encode(std::string_view text) const;
  // Appends to `ids`. `continues`: the text continues one that is encoded already, so the space
  // that some models put before each text is not added again.
  void encode(std::string_view text, std::vector<int32_t>& ids, bool continues = false) const;

  // The first part of a text that is encoded in parts.
  struct Part {
    size_t bytes = 0;   // its length
    bool exact = true;  // the cut does not change the tokens of the text
  };
  static constexpr size_t kPartBytes = size_t{256} << 10;
  // The first part of `text`: all of it up to kPartBytes; a longer text is cut after a newline or
  // before a space, where no piece of the vocabulary can span the cut. If there is no such place,
  // or if the model normalises text, the cut falls between characters after kPartBytes or up to 3
  // bytes fewer, and tokens near it may differ.
  Part part(std::string_view text) const;

  // Control tokens (bos, eos, ...) decode to nothing. The result of a few ids may end inside a
  // UTF-8 character. Throws ExitCode::kData for an id outside of the vocabulary.
  std::string decode(std::span<const int32_t> ids) const;

  // The bytes that one token stands for. Their number, summed over a text, is the text's length,
  // which converts nats per token to bits per byte.
  std::string_view bytes(int32_t id) const;
  int64_t byte_length(int32_t id) const { return static_cast<int64_t>(bytes(id).size()); }

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }  // pieces
  int32_t bos() const { return bos_; }                                  // -1: none
  int32_t eos() const { return eos_; }                                  // -1: none
  int32_t unk() const { return unk_; }
  // True if decode(encode(x)) == x for every x. False for models with normalisation, with a dummy
  // prefix or without byte fallback, which Tokenizer accepts as well.
  bool lossless() const { return flaw_.empty(); }
  // Why the model is not lossless, as a predicate such as "normalises text"; empty if it is.
  const std::string& flaw() const { return flaw_; }
  const std::string& hash() const { return hash_; }  // SHA-256 of the model file, hexadecimal
  const std::string& path() const { return path_; }

 private:
  void encode_part(std::string_view text, std::vector<int32_t>& ids, bool continues) const;
  void encode_plain(std::string_view text, std::vector<int32_t>& ids, bool continues) const;
  void encode_line(std::string_view line, std::vector<int32_t>& ids, bool continues) const;
  void encode_valid(std::string_view text, std::vector<int32_t>& ids, bool continues) const;
  void encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const;
  void load(const std::string& model);
  void read_pieces();
  void try_model();

  std::string path_;
  std::string hash_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  // The same model without its dummy prefix (a space before each text); null if it has none.
  std::unique_ptr<sentencepiece::SentencePieceProcessor> continuation_;
  std::vector<std::string> bytes_;  // of each token
  std::vector<int32_t> byte_ids_;   // of each byte; empty without byte fallback
  int32_t bos_ = -1;
  int32_t eos_ = -1;
  int32_t unk_ = 0;
  std::string flaw_;
  // Whether text may be cut without changing its tokens: after a newline, because no piece spans
  // one; before a space, because no piece has a space after another character.
  bool split_lines_ = false;
  bool split_words_ = false;
};

struct TokenizerTraining {
  int64_t vocab = 4096;
  // Bytes of text to train on at most; from more text, an even sample of lines is taken. Time and
  // memory grow with this number, quality hardly does.
  int64_t max_bytes = int64_t{256} << 20;
};

// Gives one document after the other; returns false at the end.
using NextText = std::function<bool(std::string& text)>;

// Trains a model and writes it to `output` through a temporary file. The same text gives the same
// model. Throws ExitCode::kUsage if there is too little text for the vocabulary, kStorage.
void train_tokenizer(const NextText& next, const TokenizerTraining& options,
                     const std::string& output);

}  // namespace sbtrain
