// What the harnesses of tokenizers share: every text comes back from a tokenizer that was accepted,
// unless the tokenizer itself says why it does not.
#pragma once

#include <cstdlib>
#include <utility>

#include "fuzz/harness.h"
#include "tokenizer/byte_level_bpe.h"

namespace sbtrain::test {

inline void check_bpe(BpeDescription description, bool special) {
  constexpr std::string_view kText = "It's 12345 \xc3\xa9tudes\n\n  \xff<|x|> na\xc3\xafve";
  const ByteLevelBpe bpe(std::move(description), special);
  const Vocabulary& vocabulary = bpe.vocabulary();
  std::vector<int32_t> ids;
  bpe.encode(kText, ids, false);
  std::string text;
  for (const int32_t id : ids) {
    if (id < 0 || static_cast<size_t>(id) >= vocabulary.bytes.size()) std::abort();
    text += vocabulary.bytes[static_cast<size_t>(id)];
  }
  if (!special && vocabulary.flaw.empty() && text != kText) std::abort();
}

}  // namespace sbtrain::test
