// Regular expressions that cut text into pieces, as tokenizers define them.
//
// A tokenizer's pattern is written for the library of its origin: Oniguruma (tokenizer.json) or
// Rust's regex (tiktoken). PCRE2 runs it here, so the pattern is first rewritten where the
// libraries differ (what \s matches, whether $ matches at each line). Constructs whose meaning
// differs and that no rewriting covers are refused by name. Character properties are those of the
// PCRE2 library's version of Unicode: 14 in PCRE2 10.42.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;
struct pcre2_real_jit_stack_8;

namespace sbtrain {

// What matching needs to write to: one for each thread.
class MatchScratch {
 public:
  MatchScratch();

 private:
  friend class SplitPattern;
  struct Free {
    void operator()(pcre2_real_match_context_8* context) const noexcept;
    void operator()(pcre2_real_match_data_8* data) const noexcept;
    void operator()(pcre2_real_jit_stack_8* stack) const noexcept;
  };
  std::unique_ptr<pcre2_real_jit_stack_8, Free> stack_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
};

class SplitPattern {
 public:
  enum class Syntax { kOniguruma, kRust };

  // Throws ExitCode::kData, with `where` before the reason, for a pattern that is not valid, that
  // is not supported, or that matches the empty string.
  SplitPattern(const std::string& pattern, Syntax syntax, const std::string& where);

  struct Match {
    size_t begin = 0;
    size_t end = 0;
    // kUndecided: text after the end decides whether there is a match from `begin`, or how long it
    // is; there is none before `begin`. kNone: `begin` is the end of the text.
    enum class Kind { kFound, kNone, kUndecided } kind = Kind::kNone;
  };
  // The first match in `text` (valid UTF-8) from `from` on. `open`: more text follows that is not
  // given. Throws ExitCode::kData if PCRE2 gives up, because a pattern takes exponential time.
  Match find(std::string_view text, size_t from, bool open, MatchScratch& scratch) const;

  // Whether a match may depend on the text before it.
  bool looks_back() const { return looks_back_; }

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const noexcept;
  };
  std::string where_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
  bool looks_back_ = false;
};

}  // namespace sbtrain
