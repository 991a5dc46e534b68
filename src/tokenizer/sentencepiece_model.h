// sentencepiece's models (Kudo and Richardson, arXiv 1808.06226), run by its own library.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer_model.h"

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace sbtrain {

class SentencePieceModel : public TokenizerModel {
 public:
  // `content`: of the file at `path`. Throws ExitCode::kData.
  SentencePieceModel(const std::string& content, const std::string& path);
  ~SentencePieceModel() override;
  SentencePieceModel(const SentencePieceModel&) = delete;
  SentencePieceModel& operator=(const SentencePieceModel&) = delete;

  const Vocabulary& vocabulary() const override { return vocabulary_; }
  void encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const override;
  TextChunk first_chunk(std::string_view text) const override;

 private:
  void encode_plain(std::string_view text, std::vector<int32_t>& ids, bool continues) const;
  void encode_line(std::string_view line, std::vector<int32_t>& ids, bool continues) const;
  void encode_valid(std::string_view text, std::vector<int32_t>& ids, bool continues) const;
  void encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const;
  void load(const std::string& content, const std::string& path);
  void read_pieces();
  void try_model();
  std::string decode(const std::vector<int32_t>& ids) const;

  Vocabulary vocabulary_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  // The same model without its dummy prefix (a space before each text); null if it has none.
  std::unique_ptr<sentencepiece::SentencePieceProcessor> continuation_;
  std::vector<int32_t> byte_ids_;  // of each byte; empty without byte fallback
  // Whether text may be cut without changing its tokens: after a newline, because no piece spans
  // one; before a space, because no piece has a space after another character.
  bool split_lines_ = false;
  bool split_words_ = false;
};

}  // namespace sbtrain
