// Regular expressions that cut text into pieces, as tokenizers define them.
//
// A tokenizer's pattern is written for the library of its origin: Oniguruma (tokenizer.json) or
// Rust's regex (tiktoken). PCRE2 runs it here, so the pattern is first rewritten where the
// libraries differ (what \s matches, whether $ matches at each line). Constructs whose meaning
// differs and that no rewriting covers are refused by name. Character properties are those of the
// PCRE2 library's version of Unicode: 14 in PCRE2 10.42.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;
struct pcre2_real_jit_stack_8;

namespace sbtrain {

// The processor time that patterns may take for one text, for the thread that matches. Published
// patterns take less than a hundredth of it.
class MatchTime {
 public:
  // Allows the time for a text of so many bytes, from now on.
  void allow(size_t bytes);
  // Whether the time is used up. Cheap enough to be asked before every match.
  bool is_up() const;
  int64_t allowed_ns() const { return allowed_ns_; }

 private:
  int64_t allowed_ns_ = 0;
  int64_t wall_start_ns_ = 0;
  int64_t cpu_start_ns_ = 0;
};

// What matching needs to write to: one for each thread.
class MatchScratch {
 public:
  MatchScratch();
  MatchScratch(const MatchScratch&) = delete;
  MatchScratch& operator=(const MatchScratch&) = delete;
  // Begins a text: what it may take, from now on, is that of a text of so many bytes.
  void begin_text(size_t bytes) { time_.allow(bytes); }

 private:
  friend class SplitPattern;
  struct Free {
    void operator()(pcre2_real_match_context_8* context) const noexcept;
    void operator()(pcre2_real_match_data_8* data) const noexcept;
    void operator()(pcre2_real_jit_stack_8* stack) const noexcept;
  };
  MatchTime time_;
  std::unique_ptr<pcre2_real_jit_stack_8, Free> stack_;
  std::unique_ptr<pcre2_real_match_context_8, Free> quick_;    // for the code of the same name
  std::unique_ptr<pcre2_real_match_context_8, Free> careful_;  // asks time_, so it may not move
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
  // given. Throws ExitCode::kData, naming the pattern, if it takes more than the scratch's time, or
  // more than kHeapKib of memory.
  Match find(std::string_view text, size_t from, bool open, MatchScratch& scratch) const;

  // Whether a match may depend on the text before it.
  bool looks_back() const { return looks_back_; }

  static constexpr uint32_t kHeapKib = uint32_t{64} << 10;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const noexcept;
  };
  using Code = std::unique_ptr<pcre2_real_code_8, Free>;
  Code compile(const std::string& rewritten, uint32_t options) const;
  int match(std::string_view text, size_t from, uint32_t options, MatchScratch& scratch) const;
  [[noreturn]] void give_up(int error, size_t bytes, const MatchScratch& scratch) const;

  std::string where_;
  std::string pattern_;  // for messages: its beginning
  // Two codes of the same pattern. The quick one may try only so much; what it does not finish
  // begins anew with the careful one, which asks at every item of the pattern how late it is, and
  // is many times slower.
  Code quick_;
  Code careful_;
  bool looks_back_ = false;
};

}  // namespace sbtrain
