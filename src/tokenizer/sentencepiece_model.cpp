#include "tokenizer/sentencepiece_model.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"

namespace sbtrain {
namespace {

// sentencepiece writes U+2581 where the text has a space, and takes one in the text for a space.
constexpr std::string_view kSpaceMark = "\xe2\x96\x81";

std::string with_spaces(std::string_view piece) {
  std::string text;
  for (size_t i = 0; i < piece.size();) {
    if (piece.substr(i).starts_with(kSpaceMark)) {
      text += ' ';
      i += kSpaceMark.size();
    } else {
      text += piece[i++];
    }
  }
  return text;
}

// Whether a space that follows a character other than a space, in whichever spelling, is at `i`.
bool space_after_word(std::string_view text, size_t i) {
  return text[i] == ' ' && i > 0 && text[i - 1] != ' ' && !text.substr(0, i).ends_with(kSpaceMark);
}

bool goes_on_with_space(std::string_view text) {
  for (size_t i = 1; i < text.size(); ++i) {
    if (space_after_word(text, i)) return true;
  }
  return false;
}

void check(const sentencepiece::util::Status& status, ExitCode code, const std::string& what) {
  if (!status.ok()) fail(code, "{}: {}", what, status.ToString());
}

}  // namespace

SentencePieceModel::~SentencePieceModel() = default;

SentencePieceModel::SentencePieceModel(const std::string& content, const std::string& path)
    : processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {
  load(content, path);
  vocabulary_.bos = processor_->bos_id();
  vocabulary_.eos = processor_->eos_id();
  vocabulary_.unk = processor_->unk_id();
  read_pieces();
  try_model();
}

void SentencePieceModel::load(const std::string& content, const std::string& path) {
  const auto status = processor_->LoadFromSerializedProto(content);
  if (!status.ok() || processor_->GetPieceSize() <= 0) {
    fail(ExitCode::kData,
         "{}: neither a tokenizer.json nor a tiktoken file, and not a sentencepiece model, or a "
         "damaged one ({})",
         path, status.ToString());
  }
  // A parser merges a message that a serialised protocol buffer holds twice, so this sets
  // normalizer_spec.add_dummy_prefix (field 3 of field 3 of ModelProto) to false.
  constexpr std::string_view kNoDummyPrefix("\x1a\x02\x18\x00", 4);
  auto continuation = std::make_unique<sentencepiece::SentencePieceProcessor>();
  check(continuation->LoadFromSerializedProto(content + std::string(kNoDummyPrefix)),
        ExitCode::kInternal, path);
  std::vector<int> first;
  std::vector<int> later;
  check(processor_->Encode("a", &first), ExitCode::kData, path);
  check(continuation->Encode("a", &later), ExitCode::kData, path);
  if (first != later) continuation_ = std::move(continuation);
}

void SentencePieceModel::read_pieces() {
  const int count = processor_->GetPieceSize();
  vocabulary_.bytes.resize(static_cast<size_t>(count));
  std::vector<int32_t> byte_ids(256, -1);
  split_lines_ = split_words_ = true;
  for (int id = 0; id < count; ++id) {
    const std::string& piece = processor_->IdToPiece(id);
    std::string& bytes = vocabulary_.bytes[static_cast<size_t>(id)];
    if (processor_->IsByte(id)) {
      const auto value = static_cast<uint8_t>(std::stoi(piece.substr(3, 2), nullptr, 16));
      bytes = static_cast<char>(value);
      byte_ids[value] = id;
    } else if (!processor_->IsControl(id) && !processor_->IsUnknown(id)) {
      bytes = with_spaces(piece);
      split_lines_ = split_lines_ && bytes.find('\n') == std::string::npos;
      split_words_ = split_words_ && !goes_on_with_space(bytes);
    }
  }
  if (std::find(byte_ids.begin(), byte_ids.end(), -1) == byte_ids.end()) {
    byte_ids_ = std::move(byte_ids);
  }
}

// sentencepiece does not tell how a model changes text, so the model is tried on a probe that has
// spaces at both ends and in a row, width and case folding, composition, and newlines.
void SentencePieceModel::try_model() {
  const std::string probe = " a  B\t\n\n \xef\xbc\xa1 e\xcc\x81 \xef\xac\x81 ";
  std::vector<int32_t> ids;
  if (!byte_ids_.empty()) encode_valid(probe, ids, /*continues=*/true);
  const bool keeps_text = !byte_ids_.empty() && decode(ids) == probe;
  if (byte_ids_.empty()) {
    vocabulary_.flaw = "has no byte fallback";
  } else if (!keeps_text) {
    vocabulary_.flaw = "normalises text";
  } else if (continuation_) {
    vocabulary_.flaw = "puts a space before each text (add_dummy_prefix)";
  }
  split_lines_ = split_lines_ && keeps_text;
  split_words_ = split_words_ && keeps_text;
}

void SentencePieceModel::encode_valid(std::string_view text, std::vector<int32_t>& ids,
                                      bool continues) const {
  const auto& processor = continues && continuation_ ? continuation_ : processor_;
  std::vector<int> part;
  check(processor->Encode({text.data(), text.size()}, &part), ExitCode::kInternal,
        "sentencepiece cannot encode");
  ids.insert(ids.end(), part.begin(), part.end());
}

void SentencePieceModel::encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const {
  for (const char byte : bytes) ids.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
}

TextChunk SentencePieceModel::first_chunk(std::string_view text) const {
  if (text.size() <= kChunkBytes) return {text.size(), true};
  const std::string_view window = text.substr(0, kChunkBytes);
  const size_t newline = split_lines_ ? window.rfind('\n') : std::string_view::npos;
  if (newline != std::string_view::npos) return {newline + 1, true};
  for (size_t i = kChunkBytes - 1; split_words_ && i > 0; --i) {
    if (space_after_word(window, i)) return {i, true};
  }
  return {character_boundary(text, kChunkBytes), false};
}

void SentencePieceModel::encode(std::string_view text, std::vector<int32_t>& ids,
                                bool continues) const {
  if (byte_ids_.empty()) {
    encode_valid(text, ids, continues);
    return;
  }
  while (!text.empty()) {
    const size_t valid = valid_length(text);
    if (valid > 0) {
      encode_plain(text.substr(0, valid), ids, continues);
      text.remove_prefix(valid);
    } else {  // sentencepiece would replace a byte that is not UTF-8
      encode_bytes(text.substr(0, 1), ids);
      text.remove_prefix(1);
    }
    continues = true;
  }
}

// Long lines are cut before spaces, so that the merge's working set stays in cache here too.
void SentencePieceModel::encode_line(std::string_view line, std::vector<int32_t>& ids,
                                     bool continues) const {
  constexpr size_t kLineBytes = 4096;
  while (split_words_ && line.size() > kLineBytes) {
    size_t space = line.find(' ', kLineBytes);
    while (space != std::string_view::npos && !space_after_word(line, space)) {
      space = line.find(' ', space + 1);
    }
    if (space == std::string_view::npos) break;
    encode_valid(line.substr(0, space), ids, continues);
    line.remove_prefix(space);
    continues = true;
  }
  encode_valid(line, ids, continues);
}

void SentencePieceModel::encode_plain(std::string_view text, std::vector<int32_t>& ids,
                                      bool continues) const {
  if (!split_lines_) return encode_valid(text, ids, continues);
  // Pieces never span lines, so encoding line by line gives the ids of the whole text, and the
  // merge's working set stays in cache. A dummy prefix is put before the first line, empty or not.
  size_t from = !continues && continuation_ ? 1 : 0;
  while (true) {
    const size_t newline = text.find('\n', from);
    const std::string_view line = text.substr(0, newline);
    if (!line.empty()) encode_line(line, ids, continues);
    if (newline == std::string_view::npos) return;
    encode_bytes("\n", ids);
    text.remove_prefix(newline + 1);
    continues = true;
    from = 0;
  }
}

std::string SentencePieceModel::decode(const std::vector<int32_t>& ids) const {
  std::string text;
  for (const int32_t id : ids) text += vocabulary_.bytes[static_cast<size_t>(id)];
  return text;
}

}  // namespace sbtrain
