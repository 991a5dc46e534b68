#include "tokenizer/bpe_training.h"

#include <algorithm>
#include <queue>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/tokenizer_files.h"

namespace sbtrain {
namespace {

constexpr std::array<const char*, 2> kSpecial = {"<|begin_of_text|>", "<|end_of_text|>"};
constexpr int64_t kLeastCount = 2;  // of a pair that is merged

using PieceCounts = std::unordered_map<std::string, int64_t>;

PieceCounts count_pieces(const std::vector<std::string>& texts) {
  std::vector<PreTokenizer::Stage> stages;
  stages.push_back({SplitPattern(kLlama3Pattern, SplitPattern::Syntax::kOniguruma, "training")});
  const PreTokenizer pre_tokenizer(std::move(stages));
  MatchScratch scratch;
  PieceCounts counts;
  std::string key;
  for (const std::string& text : texts) {
    scratch.begin_text(text.size());
    // Bytes that are not valid UTF-8 have no place in a pattern; they are tokens in any case.
    std::string_view rest = text;
    while (!rest.empty()) {
      const size_t valid = valid_length(rest);
      pre_tokenizer.split(rest.substr(0, valid), /*open=*/false, scratch,
                          [&](std::string_view piece) { ++counts[key.assign(piece)]; });
      rest.remove_prefix(std::min(rest.size(), valid + 1));
    }
  }
  return counts;
}

struct Merge {
  int32_t left, right;
};

class Trainer {
 public:
  explicit Trainer(const PieceCounts& pieces) {
    for (int byte = 0; byte < 256; ++byte) add_token(std::string(1, static_cast<char>(byte)));
    // In alphabetical order, so that the order of a hash table decides nothing.
    std::vector<std::pair<std::string_view, int64_t>> sorted(pieces.begin(), pieces.end());
    std::sort(sorted.begin(), sorted.end());
    for (const auto& [piece, count] : sorted) {
      Word word{.ids = {}, .count = count};
      for (const char c : piece) word.ids.push_back(static_cast<unsigned char>(c));
      words_.push_back(std::move(word));
      change_pairs(words_.size() - 1, +1);
    }
    for (const auto& [key, pair] : pairs_) push(key);
    grown_.clear();
  }

  // Merges until there are `tokens` tokens. False: there are not enough pairs.
  bool grow(size_t tokens) {
    while (tokens_.size() < tokens) {
      if (!pop()) return false;
    }
    return true;
  }

  const std::vector<std::string>& tokens() const { return tokens_; }
  const std::vector<Merge>& merges() const { return merges_; }

 private:
  struct Word {
    std::vector<int32_t> ids;
    int64_t count = 0;
  };
  struct Pair {
    int64_t count = 0;
    std::vector<uint32_t> words;  // where it occurs, or occurred; a word may be listed twice
  };
  struct Candidate {
    int64_t count;
    uint64_t key;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : key > other.key;
    }
  };

  static constexpr int32_t kAny = -1;

  static uint64_t key_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  // Two different merges may give the same bytes: then they give one token.
  int32_t add_token(const std::string& bytes) {
    const auto [at, added] = ids_.emplace(bytes, static_cast<int32_t>(tokens_.size()));
    if (added) tokens_.push_back(bytes);
    return at->second;
  }

  void push(uint64_t key) {
    const int64_t count = pairs_.at(key).count;
    if (count >= kLeastCount) queue_.push({count, key});
  }

  // Adds the pairs of a word to the counts, or takes them away. Of those that are added, only pairs
  // with the token `made` are new to the word.
  void change_pairs(size_t number, int sign, int32_t made = kAny) {
    const Word& word = words_[number];
    for (size_t i = 0; i + 1 < word.ids.size(); ++i) {
      const uint64_t key = key_of(word.ids[i], word.ids[i + 1]);
      Pair& pair = pairs_[key];
      pair.count += sign * word.count;
      if (sign < 0 || (made != kAny && word.ids[i] != made && word.ids[i + 1] != made)) continue;
      grown_.push_back(key);
      const auto at = static_cast<uint32_t>(number);
      if (pair.words.empty() || pair.words.back() != at) pair.words.push_back(at);
    }
  }

  // Merges the most frequent pair. Its entry in the queue may be of an earlier, larger count: then
  // it goes back with that of today.
  bool pop() {
    while (!queue_.empty()) {
      const Candidate best = queue_.top();
      queue_.pop();
      const int64_t count = pairs_.at(best.key).count;
      if (count == best.count) return merge(best.key), true;
      push(best.key);
    }
    return false;
  }

  void merge(uint64_t key) {
    const auto left = static_cast<int32_t>(key >> 32);
    const auto right = static_cast<int32_t>(key & 0xffffffff);
    const int32_t result =
        add_token(tokens_[static_cast<size_t>(left)] + tokens_[static_cast<size_t>(right)]);
    merges_.push_back({left, right});
    const std::vector<uint32_t> words = std::move(pairs_.at(key).words);
    pairs_.at(key).words.clear();
    grown_.clear();
    for (const uint32_t number : words) {
      change_pairs(number, -1);
      std::vector<int32_t>& ids = words_[number].ids;
      size_t kept = 0;
      for (size_t i = 0; i < ids.size(); ++kept) {
        const bool joined = i + 1 < ids.size() && ids[i] == left && ids[i + 1] == right;
        ids[kept] = joined ? result : ids[i];
        i += joined ? 2 : 1;
      }
      ids.resize(kept);
      change_pairs(number, +1, result);
    }
    std::sort(grown_.begin(), grown_.end());
    grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
    for (const uint64_t other : grown_) push(other);
  }

  std::vector<Word> words_;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<uint64_t> grown_;  // pairs whose counts a merge may have raised
  std::vector<Merge> merges_;
};

std::string to_json(const Trainer& trainer) {
  TokenizerJson tokenizer{.tokens = trainer.tokens(), .pattern = kLlama3Pattern};
  for (const auto& [left, right] : trainer.merges()) tokenizer.merges.emplace_back(left, right);
  for (const char* content : kSpecial) {
    const size_t id = tokenizer.tokens.size() + tokenizer.added.size();
    tokenizer.added.push_back(
        {.content = content, .id = static_cast<int32_t>(id), .special = true});
  }
  return write_tokenizer_json(tokenizer);
}

}  // namespace

std::string train_bpe(const std::vector<std::string>& texts, int64_t vocab) {
  Trainer trainer(count_pieces(texts));
  if (!trainer.grow(static_cast<size_t>(vocab) - kSpecial.size())) {
    fail(ExitCode::kUsage,
         "cannot train a tokenizer of {} tokens on this text: after {} tokens no pair occurs "
         "twice; use more text or a smaller vocabulary",
         vocab, trainer.tokens().size() + kSpecial.size());
  }
  return to_json(trainer);
}

}  // namespace sbtrain
