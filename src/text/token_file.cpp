#include "text/token_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/error.h"
#include "text/text_reader.h"

namespace sbtrain {
namespace {

// GPT-2's tokenizer, and that of Llama 3, whose documents llm.c starts with <|begin_of_text|>.
constexpr std::array kModels = {
    LlmCModel{
        .magic = 20240520, .version = 1, .token_bytes = 2, .vocab = 50257, .end_of_text = 50256},
    LlmCModel{
        .magic = 20240801, .version = 7, .token_bytes = 4, .vocab = 128256, .end_of_text = 128000}};

constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr size_t kPartBytes = kTextPartBytes;  // a multiple of the size of a token

int32_t header_field(std::string_view head, size_t index) {
  int32_t value = 0;
  std::memcpy(&value, head.data() + index * sizeof value, sizeof value);
  return value;
}

class TokenReader final : public RecordReader {
 public:
  TokenReader(std::unique_ptr<ByteSource> source, const DocumentOrigin& origin,
              const LlmCModel* model, int64_t end_of_text)
      : window_(std::move(source)),
        origin_(origin),
        token_bytes_(model ? model->token_bytes : kNanoGptTokenBytes),
        end_of_text_(end_of_text) {
    if (model) skip_header();
  }

  bool next(RawDocument& document) override {
    while (true) {
      const bool more = window_.fill(kPartBytes + width());
      std::string_view bytes = window_.bytes();
      if (!more && bytes.size() % width() != 0) {
        fail(ExitCode::kData, "{}: it ends inside of a token of {} bytes; the file was cut short",
             origin_.name, token_bytes_);
      }
      if (bytes.empty()) return at_end();
      const size_t part = std::min(bytes.size() / width() * width(), kPartBytes);
      const size_t length = find_end(bytes.substr(0, part));
      // The document ends in this part: at an end of text, or with the file.
      const bool ended = length < bytes.size() && is_end(bytes.substr(length));
      const bool last = ended || length == bytes.size();
      document = {.kind = RawDocument::Kind::kTokens,
                  .data = std::string(bytes.substr(0, length)),
                  .origin = &origin_,
                  .position = tokens_,
                  .token_bytes = token_bytes_,
                  .first = !started_,
                  .last = last};
      const size_t taken = length + (ended ? width() : 0);
      window_.consume(taken);
      tokens_ += static_cast<int64_t>(taken / width());
      started_ = !last;
      if (length > 0) return true;
    }
  }

 private:
  size_t width() const { return static_cast<size_t>(token_bytes_); }

  void skip_header() {
    if (!window_.fill(kHeaderBytes)) {
      fail(ExitCode::kData, "{}: it ends inside of llm.c's header of {} bytes", origin_.name,
           kHeaderBytes);
    }
    expected_ = header_field(window_.bytes(), 2);
    if (expected_ < 0) {
      fail(ExitCode::kData, "{}: its header gives the number of tokens as {}; the file is damaged",
           origin_.name, expected_);
    }
    window_.consume(kHeaderBytes);
  }

  bool at_end() const {
    if (expected_ >= 0 && tokens_ != expected_) {
      fail(ExitCode::kData, "{}: it has {} tokens, and its header says {}; the file is damaged",
           origin_.name, tokens_, expected_);
    }
    return false;
  }

  bool is_end(std::string_view bytes) const {
    if (token_bytes_ == 2) return read<uint16_t>(bytes) == end_of_text_;
    return read<uint32_t>(bytes) == end_of_text_;
  }
  // The offset of the first end of text in a number of whole tokens, or their length.
  size_t find_end(std::string_view bytes) const {
    return token_bytes_ == 2 ? find<uint16_t>(bytes) : find<uint32_t>(bytes);
  }
  template <typename Token>
  static int64_t read(std::string_view bytes) {
    Token token = 0;
    std::memcpy(&token, bytes.data(), sizeof token);
    return token;
  }
  template <typename Token>
  size_t find(std::string_view bytes) const {
    size_t at = 0;
    while (at < bytes.size() && read<Token>(bytes.substr(at)) != end_of_text_) at += sizeof(Token);
    return at;
  }

  ByteWindow window_;
  const DocumentOrigin& origin_;
  const int token_bytes_;
  const int64_t end_of_text_;
  int64_t expected_ = -1;  // the number of tokens; -1: unknown
  int64_t tokens_ = 0;     // read so far
  bool started_ = false;   // a part of the current document has been returned
};

}  // namespace

const LlmCModel* llmc_model(std::string_view head) {
  if (head.size() < 2 * sizeof(int32_t)) return nullptr;
  for (const LlmCModel& model : kModels) {
    if (header_field(head, 0) == model.magic && header_field(head, 1) == model.version) {
      return &model;
    }
  }
  return nullptr;
}

std::unique_ptr<RecordReader> read_tokens(std::unique_ptr<ByteSource> source,
                                          const DocumentOrigin& origin, const LlmCModel* model,
                                          int64_t end_of_text) {
  return std::make_unique<TokenReader>(std::move(source), origin, model, end_of_text);
}

}  // namespace sbtrain
