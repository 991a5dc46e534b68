// Converts text to token ids and back, with the tokenizer of a file: a sentencepiece model
// (.model), the tokenizer.json of a byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), or a file of
// tiktoken's ranks. The file's content decides which it is.
//
// Models trained here are sentencepiece's byte-fallback BPE without normalisation. With them, as
// with byte-level BPE that does not normalise, decode(encode(x)) == x for every string of bytes x,
// invalid UTF-8 included; sentencepiece alone makes a space of U+2581, with which it writes spaces.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/enum_names.h"
#include "tokenizer/tokenizer_model.h"

namespace sbtrain {

struct TokenizerOptions {
  // Special tokens that are written in a text (<|endoftext|>) become their ids. Otherwise they are
  // text like any other, so that no document of a corpus can end itself. The control tokens of
  // sentencepiece are text in any case.
  bool special = false;
};

class Tokenizer {
 public:
  // Loads a tokenizer's file. Throws ExitCode::kData for a file that is damaged, or that asks for
  // something that is not supported, by its name.
  explicit Tokenizer(const std::string& path, const TokenizerOptions& options = {});

  // Thread-safe. Adds no bos or eos. Working memory does not grow with the text: a text of more
  // than kChunkBytes is encoded in chunks.
  std::vector<int32_t> encode(std::string_view text) const;
  // Appends to `ids`. `continues`: the text continues one that is encoded already, so the space
  // that some models put before each text is not added again.
  void encode(std::string_view text, std::vector<int32_t>& ids, bool continues = false) const;

  using Chunk = TextChunk;
  static constexpr size_t kChunkBytes = TokenizerModel::kChunkBytes;
  // The first chunk of `text`: all of it up to kChunkBytes; a longer text is cut within kChunkBytes
  // where the cut cannot change a token: for sentencepiece after a newline or before a space that
  // no piece of the vocabulary can span, for byte-level BPE between two pieces of its regular
  // expression. If there is no such place, or if a sentencepiece model normalises text, the cut
  // falls between characters at kChunkBytes or up to 3 bytes before, and tokens near it may differ.
  Chunk first_chunk(std::string_view text) const { return model_->first_chunk(text); }

  // Special tokens (bos, eos, ...) decode to nothing. The result of a few ids may end inside a
  // UTF-8 character. Throws ExitCode::kData for an id outside of the vocabulary.
  std::string decode(std::span<const int32_t> ids) const;

  // The bytes that one token stands for. Their number, summed over a text, is the text's length,
  // which converts nats per token to bits per byte.
  std::string_view bytes(int32_t id) const;
  int64_t byte_length(int32_t id) const { return static_cast<int64_t>(bytes(id).size()); }

  int64_t size() const {
    return static_cast<int64_t>(vocabulary_->bytes.size());
  }                                                 // largest id + 1
  int32_t bos() const { return vocabulary_->bos; }  // -1: none
  int32_t eos() const { return vocabulary_->eos; }  // -1: none
  int32_t unk() const { return vocabulary_->unk; }  // -1: none
  // Whether the tokenizer's files say that a text begins with bos: tokenizer_config.json by
  // add_bos_token or, where it does not, the template of tokenizer.json's post-processor. encode()
  // adds none.
  bool adds_bos() const { return adds_bos_; }
  // The special tokens by their content, chat templates' among them. Empty for sentencepiece.
  const std::map<std::string, int32_t, std::less<>>& special() const {
    return vocabulary_->special;
  }
  // True if decode(encode(x)) == x for every x without special tokens that become ids. False for
  // models with normalisation, with a dummy prefix or without byte fallback, which Tokenizer
  // accepts as well.
  bool lossless() const { return flaw().empty(); }
  // Why the model is not lossless, as a predicate such as "normalises text"; empty if it is.
  const std::string& flaw() const { return vocabulary_->flaw; }
  // The fingerprint by which data, checkpoints and exports know their tokenizer: SHA-256 of the
  // file, hexadecimal. For a tiktoken file whose name chooses the encoding, it covers that as well.
  const std::string& hash() const { return hash_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string hash_;
  std::shared_ptr<const TokenizerModel> model_;
  const Vocabulary* vocabulary_ = nullptr;  // of model_
  bool adds_bos_ = false;
};

// Tokenizer(path).hash(), without loading more than the file.
std::string tokenizer_fingerprint(const std::string& path);

// A file that belongs to a tokenizer: where it is, and under which name a copy is found again.
struct TokenizerFile {
  std::string path;
  std::string name;
};
// The tokenizer's own file first, then those beside it that hold its special tokens and chat
// template: tokenizer_config.json, special_tokens_map.json and chat_template.jinja. They come along
// wherever the tokenizer is kept.
std::vector<TokenizerFile> tokenizer_files(const std::string& path);

// The tokenizers among such copies in `folder`. There may be the same one in two formats.
std::vector<std::string> find_tokenizers(const std::string& folder);
// The first of them; empty if there is none.
std::string find_tokenizer(const std::string& folder);

// The tokenizer.json with the tokens of a file of tiktoken's ranks, for programs that do not read
// such files. `bos`: it says that texts begin with bos.
std::string tiktoken_as_json(const std::string& path, bool bos);

// Throws ExitCode::kConfig for a tokenizer with ids that a model of `vocab` tokens does not have.
void check_vocabulary(const Tokenizer& tokenizer, int64_t vocab);

enum class TokenizerType : uint8_t {
  kSentencePiece,  // a sentencepiece model with byte fallback
  kBpe,            // the tokenizer.json of a byte-level BPE
};
template <>
inline constexpr auto kNames<TokenizerType> = enum_names<TokenizerType>(
    {{TokenizerType::kSentencePiece, "sentencepiece"}, {TokenizerType::kBpe, "bpe"}});

struct TokenizerTraining {
  TokenizerType type = TokenizerType::kSentencePiece;
  int64_t vocab = 4096;
  // Bytes of text to train on at most; from more text, an even sample of lines is taken. Time and
  // memory grow with this number, quality hardly does.
  int64_t max_bytes = int64_t{256} << 20;
  std::string input = "the text";  // how messages name it
};

// Gives one document after the other; returns false at the end.
using NextText = std::function<bool(std::string& text)>;

// Trains a model and writes it to `output` through a temporary file. The same text gives the same
// model. Throws ExitCode::kUsage if there is too little text for the vocabulary, kStorage.
void train_tokenizer(const NextText& next, const TokenizerTraining& options,
                     const std::string& output);

}  // namespace sbtrain
