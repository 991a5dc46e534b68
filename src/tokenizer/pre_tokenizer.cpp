#include "tokenizer/pre_tokenizer.h"

#include <algorithm>

namespace sbtrain {

bool PreTokenizer::forgets() const {
  return std::none_of(stages_.begin(), stages_.end(),
                      [](const Stage& stage) { return stage.pattern.looks_back(); });
}

bool PreTokenizer::keeps_text() const {
  return std::all_of(stages_.begin(), stages_.end(),
                     [](const Stage& stage) { return stage.keep_rest; });
}

void PreTokenizer::split(size_t stage, std::string_view text, bool open, MatchScratch& scratch,
                         const Emit& emit) const {
  if (stage == stages_.size()) {
    if (!open && !text.empty()) emit(text);
    return;
  }
  using Kind = SplitPattern::Match::Kind;
  const Stage& cut = stages_[stage];
  size_t from = 0;
  while (from < text.size()) {
    const SplitPattern::Match match = cut.pattern.find(text, from, open, scratch);
    const std::string_view rest = text.substr(from, match.begin - from);
    if (cut.keep_rest) split(stage + 1, rest, open && match.kind != Kind::kFound, scratch, emit);
    if (match.kind != Kind::kFound) return;
    split(stage + 1, text.substr(match.begin, match.end - match.begin), false, scratch, emit);
    from = match.end;
  }
}

}  // namespace sbtrain
