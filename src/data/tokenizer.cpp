#include "data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/files.h"
#include "core/host_threads.h"
#include "core/sha256.h"

namespace sbtrain {
namespace {

// sentencepiece writes U+2581 where the text has a space.
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

// Whether a space follows a character other than a space.
bool goes_on_with_space(std::string_view text) {
  for (size_t i = 1; i < text.size(); ++i) {
    if (text[i] == ' ' && text[i - 1] != ' ') return true;
  }
  return false;
}

// Length in bytes of the UTF-8 character that starts `text`; 0 if it is not valid.
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  const bool surrogate = lead == 0xed && byte(1) >= 0xa0;
  const bool too_large = lead == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || too_large ? 0 : length;
}

// Number of bytes at the start of `text` that sentencepiece does not change: valid UTF-8 without
// NUL and without the character that it uses as its space mark.
size_t plain_prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const std::string_view rest = text.substr(i);
    const size_t length = character_length(rest);
    if (length == 0 || rest[0] == '\0' || rest.starts_with(kSpaceMark)) break;
    i += length;
  }
  return i;
}

void check(const sentencepiece::util::Status& status, ExitCode code, const std::string& what) {
  if (!status.ok()) fail(code, "{}: {}", what, status.ToString());
}

}  // namespace

Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer::Tokenizer(const std::string& path)
    : path_(path), processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {
  const std::string model = read_input(
      path, ExitCode::kData, "; `sbtrain tokenizer train` makes a tokenizer's model from text");
  load(model);
  hash_ = sha256_hex(model);
  bos_ = processor_->bos_id();
  eos_ = processor_->eos_id();
  unk_ = processor_->unk_id();
  read_pieces();
  try_model();
}

void Tokenizer::load(const std::string& model) {
  const auto status = processor_->LoadFromSerializedProto(model);
  if (!status.ok() || processor_->GetPieceSize() <= 0) {
    fail(ExitCode::kData, "{}: not a sentencepiece model, or a damaged one ({})", path_,
         status.ToString());
  }
  // A parser merges a message that a serialised protocol buffer holds twice, so this sets
  // normalizer_spec.add_dummy_prefix (field 3 of field 3 of ModelProto) to false.
  constexpr std::string_view kNoDummyPrefix("\x1a\x02\x18\x00", 4);
  auto continuation = std::make_unique<sentencepiece::SentencePieceProcessor>();
  check(continuation->LoadFromSerializedProto(model + std::string(kNoDummyPrefix)),
        ExitCode::kInternal, path_);
  std::vector<int> first;
  std::vector<int> later;
  check(processor_->Encode("a", &first), ExitCode::kData, path_);
  check(continuation->Encode("a", &later), ExitCode::kData, path_);
  if (first != later) continuation_ = std::move(continuation);
}

void Tokenizer::read_pieces() {
  const int count = processor_->GetPieceSize();
  bytes_.resize(static_cast<size_t>(count));
  std::vector<int32_t> byte_ids(256, -1);
  split_lines_ = split_words_ = true;
  for (int id = 0; id < count; ++id) {
    const std::string& piece = processor_->IdToPiece(id);
    std::string& bytes = bytes_[static_cast<size_t>(id)];
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
void Tokenizer::try_model() {
  const std::string probe = " a  B\t\n\n \xef\xbc\xa1 e\xcc\x81 \xef\xac\x81 ";
  std::vector<int32_t> ids;
  if (!byte_ids_.empty()) encode_valid(probe, ids, /*continues=*/true);
  const bool keeps_text = !byte_ids_.empty() && decode(ids) == probe;
  if (byte_ids_.empty()) {
    flaw_ = "has no byte fallback";
  } else if (!keeps_text) {
    flaw_ = "normalises text";
  } else if (continuation_) {
    flaw_ = "puts a space before each text (add_dummy_prefix)";
  }
  split_lines_ = split_lines_ && keeps_text;
  split_words_ = split_words_ && keeps_text;
}

void Tokenizer::encode_valid(std::string_view text, std::vector<int32_t>& ids,
                             bool continues) const {
  const auto& processor = continues && continuation_ ? continuation_ : processor_;
  std::vector<int> part;
  check(processor->Encode({text.data(), text.size()}, &part), ExitCode::kInternal,
        "sentencepiece cannot encode");
  ids.insert(ids.end(), part.begin(), part.end());
}

void Tokenizer::encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const {
  for (const char byte : bytes) ids.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids, bool continues) const {
  while (!text.empty()) {
    const size_t bytes = part(text).bytes;
    encode_part(text.substr(0, bytes), ids, continues);
    text.remove_prefix(bytes);
    continues = true;
  }
}

Tokenizer::Part Tokenizer::part(std::string_view text) const {
  if (text.size() <= kPartBytes) return {text.size(), true};
  const std::string_view window = text.substr(0, kPartBytes);
  const size_t newline = split_lines_ ? window.rfind('\n') : std::string_view::npos;
  if (newline != std::string_view::npos) return {newline + 1, true};
  for (size_t i = kPartBytes - 1; split_words_ && i > 0; --i) {
    if (window[i] == ' ' && window[i - 1] != ' ') return {i, true};
  }
  size_t end = kPartBytes;
  while (end > kPartBytes - 4 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
  return {end, false};
}

void Tokenizer::encode_part(std::string_view text, std::vector<int32_t>& ids,
                            bool continues) const {
  if (byte_ids_.empty()) {
    encode_valid(text, ids, continues);
    return;
  }
  while (!text.empty()) {
    const size_t plain = plain_prefix(text);
    if (plain > 0) {
      encode_plain(text.substr(0, plain), ids, continues);
      text.remove_prefix(plain);
    } else {  // a character that sentencepiece would change is encoded as bytes
      const size_t character = std::max<size_t>(character_length(text), 1);
      encode_bytes(text.substr(0, character), ids);
      text.remove_prefix(character);
    }
    continues = true;
  }
}

// Long lines are cut before spaces, so that the merge's working set stays in cache here too.
void Tokenizer::encode_line(std::string_view line, std::vector<int32_t>& ids,
                            bool continues) const {
  constexpr size_t kLineBytes = 4096;
  while (split_words_ && line.size() > kLineBytes) {
    size_t space = line.find(' ', kLineBytes);
    while (space != std::string_view::npos && line[space - 1] == ' ') {
      space = line.find(' ', space + 1);
    }
    if (space == std::string_view::npos) break;
    encode_valid(line.substr(0, space), ids, continues);
    line.remove_prefix(space);
    continues = true;
  }
  encode_valid(line, ids, continues);
}

void Tokenizer::encode_plain(std::string_view text, std::vector<int32_t>& ids,
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

std::string_view Tokenizer::bytes(int32_t id) const {
  if (id < 0 || id >= size()) {
    fail(ExitCode::kData, "token {} is outside of the vocabulary of {} ({} pieces)", id, path_,
         size());
  }
  return bytes_[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes(id);
  return text;
}

// ---- Training ------------------------------------------------------------------------------

namespace {

constexpr size_t kMaxLine = 4096;  // bytes in one training sentence

// Lines of the documents, long ones cut at spaces. Every `stride`-th line is kept; the stride
// doubles whenever the lines would exceed `max_bytes`.
class LineSample {
 public:
  explicit LineSample(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void add(std::string_view text) {
    while (!text.empty()) {
      size_t length = std::min(text.find('\n'), text.size());
      if (length > kMaxLine) {
        const size_t space = text.substr(0, kMaxLine).rfind(' ');
        length = space == std::string_view::npos || space == 0 ? kMaxLine : space;
      }
      if (length > 0) add_line(text.substr(0, length));
      text.remove_prefix(std::min(text.size(), length + (length == 0 ? 1 : 0)));
    }
  }
  std::vector<std::string>& lines() { return lines_; }

 private:
  void add_line(std::string_view line) {
    if (seen_++ % stride_ != 0) return;
    lines_.emplace_back(line);
    bytes_ += static_cast<int64_t>(line.size());
    if (bytes_ > max_bytes_) thin();
  }

  void thin() {
    size_t kept = 0;
    bytes_ = 0;
    for (size_t i = 0; i < lines_.size(); i += 2) {
      bytes_ += static_cast<int64_t>(lines_[i].size());
      if (kept != i) lines_[kept] = std::move(lines_[i]);
      ++kept;
    }
    lines_.resize(kept);
    stride_ *= 2;
  }

  int64_t max_bytes_;
  int64_t bytes_ = 0;
  uint64_t seen_ = 0;
  uint64_t stride_ = 1;
  std::vector<std::string> lines_;
};

class Lines : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::vector<std::string>& lines) : lines_(lines) {}
  bool done() const override { return next_ >= lines_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return lines_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& lines_;
  size_t next_ = 0;
};

constexpr int kTrainingThreads = 16;

std::unordered_map<std::string, std::string> trainer_arguments(const TokenizerTraining& options) {
  return {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocab)},
      {"byte_fallback", "true"},
      {"split_digits", "true"},
      {"allow_whitespace_only_pieces", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"unk_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"pad_id", "-1"},
      {"max_sentence_length", std::to_string(2 * kMaxLine)},
      // The model records it, so it is the same on every machine.
      {"num_threads", std::to_string(kTrainingThreads)},
      {"minloglevel", "3"},
  };
}

// sentencepiece refuses vocabularies that are too small or too large; the advice depends on which.
[[noreturn]] void fail_training(int64_t vocab, const std::string& reason) {
  const std::string_view marker = "required_chars. ";
  if (const size_t at = reason.find(marker); at != std::string::npos) {
    const std::string counts = reason.substr(at + marker.size());  // "300 vs 812. Increase ..."
    const size_t vs = counts.find("vs ");
    fail(ExitCode::kUsage,
         "a tokenizer of {} pieces is too small for this text: its bytes and different characters "
         "alone take {}; use a larger vocabulary",
         vocab, vs == std::string::npos ? "more" : std::to_string(std::atoll(&counts[vs + 3])));
  }
  fail(ExitCode::kUsage,
       "cannot train a tokenizer of {} pieces on this text ({}): use more text or a smaller "
       "vocabulary",
       vocab, reason);
}

}  // namespace

void train_tokenizer(const NextText& next, const TokenizerTraining& options,
                     const std::string& output) {
  if (options.vocab < 300 || options.vocab > (1 << 24)) {
    fail(ExitCode::kUsage,
         "vocabulary of {} pieces: between 300 (256 bytes, 3 special tokens and some text) and {} "
         "are possible",
         options.vocab, 1 << 24);
  }
  LineSample sample(options.max_bytes);
  for (std::string text; next(text);) sample.add(text);
  if (sample.lines().empty()) fail(ExitCode::kUsage, "no text to train a tokenizer on");

  require_threads(kTrainingThreads, "sentencepiece needs them all.");
  Lines lines(sample.lines());
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(trainer_arguments(options), &lines, &model);
  if (!status.ok()) fail_training(options.vocab, status.ToString());
  replace_file(output, model);
}

}  // namespace sbtrain
