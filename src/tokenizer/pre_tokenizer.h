// Cuts text into the pieces that byte-pair encoding then treats one by one.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/split_pattern.h"

namespace sbtrain {

// The stages are applied one after the other: each cuts every piece of the one before it, into the
// matches of its pattern and what lies between them.
class PreTokenizer {
 public:
  struct Stage {
    SplitPattern pattern;
    bool keep_rest = true;  // false: what lies between matches is left out
  };
  explicit PreTokenizer(std::vector<Stage> stages) : stages_(std::move(stages)) {}

  using Emit = std::function<void(std::string_view piece)>;
  // Calls `emit` with each piece of `text` (valid UTF-8), in order. `open`: more text follows that
  // is not given; only pieces that it cannot change are emitted.
  void split(std::string_view text, bool open, MatchScratch& scratch, const Emit& emit) const {
    split(0, text, open, scratch, emit);
  }

  // Whether the pieces from a boundary on are the same without the text before it.
  bool forgets() const;
  bool keeps_text() const;

 private:
  void split(size_t stage, std::string_view text, bool open, MatchScratch& scratch,
             const Emit& emit) const;
  std::vector<Stage> stages_;
};

}  // namespace sbtrain
