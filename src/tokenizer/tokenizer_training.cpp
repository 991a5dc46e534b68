#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/files.h"
#include "core/host_threads.h"
#include "tokenizer/bpe_training.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

constexpr size_t kMaxLine = 4096;  // bytes in one training sentence

// Lines of the documents, long ones cut at spaces. Every `stride`-th line is kept; the stride
// doubles whenever the lines would exceed `max_bytes`. With `keep_ends` a line comes with the end
// of the line, and with those of empty lines that follow it.
class LineSample {
 public:
  LineSample(int64_t max_bytes, bool keep_ends) : max_bytes_(max_bytes), keep_ends_(keep_ends) {}

  void add(std::string_view text) {
    while (!text.empty()) {
      size_t length = std::min(text.find('\n'), text.size());
      if (keep_ends_) length = std::min(text.find_first_not_of('\n', length), text.size());
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
  bool keep_ends_;
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
  const bool bpe = options.type == TokenizerType::kBpe;
  LineSample sample(options.max_bytes, /*keep_ends=*/bpe);
  for (std::string text; next(text);) sample.add(text);
  if (sample.lines().empty()) {
    fail(ExitCode::kUsage, "{}: there is no text to train a tokenizer on", options.input);
  }

  if (bpe) return replace_file(output, train_bpe(sample.lines(), options.vocab));
  require_threads(kTrainingThreads, "sentencepiece needs them all.");
  Lines lines(sample.lines());
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(trainer_arguments(options), &lines, &model);
  if (!status.ok()) fail_training(options.vocab, status.ToString());
  replace_file(output, model);
}

}  // namespace sbtrain
