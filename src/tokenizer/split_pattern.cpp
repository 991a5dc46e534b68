#include "tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <new>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr size_t kStackStart = size_t{32} << 10;
constexpr size_t kStackLimit = size_t{4} << 20;

// What the quick code may try in one match. A try scans up to the whole text, so that a match may
// take a second at most before the careful code takes over.
constexpr uint32_t kQuickTries = 4096;

// A text may take a second, and as long as at 128 KiB a second.
constexpr int64_t kTextNs = 1'000'000'000;
constexpr int64_t kByteNs = 7'600;

int64_t read_clock(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

// Unicode's White_Space, which is \s in both libraries. PCRE2's own \s has U+180E as well.
constexpr std::string_view kWhiteSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Writes a pattern anew in PCRE2's syntax.
class Rewriter {
 public:
  Rewriter(std::string_view pattern, SplitPattern::Syntax syntax, const std::string& where)
      : pattern_(pattern), syntax_(syntax), where_(where) {}

  std::string rewrite() {
    while (at_ < pattern_.size()) {
      if (pattern_[at_] == '\\') {
        escape();
      } else if (in_class_) {
        class_character();
      } else {
        character();
      }
    }
    return std::move(out_);
  }

 private:
  std::string_view rest() const { return pattern_.substr(at_); }
  char next(size_t ahead = 1) const {
    return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : '\0';
  }
  void copy(size_t bytes) {
    out_ += pattern_.substr(at_, bytes);
    at_ += bytes;
  }
  void replace(size_t bytes, std::string_view by) {
    out_ += by;
    at_ += bytes;
  }
  [[noreturn]] void refuse(size_t bytes) const {
    fail(ExitCode::kData, "{}: the regular expression's {} (byte {}) is not supported: {}", where_,
         pattern_.substr(at_, bytes), at_, pattern_.substr(0, 200));
  }

  void escape() {
    const char c = next();
    if (c == 's') {
      replace(2, in_class_ ? std::string(kWhiteSpace) : "[" + std::string(kWhiteSpace) + "]");
    } else if (c == 'S' && !in_class_) {
      replace(2, "[^" + std::string(kWhiteSpace) + "]");
    } else if (c == 'd' || c == 'D') {
      replace(2, c == 'd' ? R"(\p{Nd})" : R"(\P{Nd})");
    } else if (c == 'p' || c == 'P') {
      property();
    } else if (c == 'u' || c == 'x') {
      code_point();
    } else if (std::string_view("rntf ").find(c) != std::string_view::npos ||
               std::ispunct(static_cast<unsigned char>(c)) != 0) {
      copy(2);
    } else {
      refuse(2);
    }
  }

  // \p{L} and its like mean the same everywhere; \p{Han} is the character's script (PCRE2: the
  // scripts that the character is used with).
  void property() {
    const size_t end = next(2) == '{' ? rest().find('}') : 2;
    if (end == std::string_view::npos) refuse(3);
    const std::string name(next(2) == '{' ? rest().substr(3, end - 3) : rest().substr(2, 1));
    const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
      return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_';
    });
    if (name.empty() || !plain) refuse(end + 1);
    const bool category = name.size() <= 2;
    replace(end + 1, fmt::format("\\{}{{{}{}}}", next(), category ? "" : "sc:", name));
  }

  // \u0041, \u{41} and \x{41}; Oniguruma's \x41 is a byte.
  void code_point() {
    const auto is_hex = [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; };
    const bool braces = next(2) == '{';
    const size_t close = braces ? rest().find('}') : 6;
    if (close == std::string_view::npos || (!braces && next() == 'x')) refuse(2);
    const std::string_view digits = braces ? rest().substr(3, close - 3) : rest().substr(2, 4);
    if (digits.empty() || digits.size() > 6 || (!braces && digits.size() < 4) ||
        !std::all_of(digits.begin(), digits.end(), is_hex)) {
      refuse(2);
    }
    replace(braces ? close + 1 : 6, fmt::format("\\x{{{}}}", digits));
  }

  // Both libraries know sets within sets and && between them, PCRE2 does not.
  void class_character() {
    if (pattern_[at_] == '[' || rest().starts_with("&&")) refuse(2);
    if (syntax_ == SplitPattern::Syntax::kRust &&
        (rest().starts_with("--") || rest().starts_with("~~"))) {
      refuse(2);
    }
    if (pattern_[at_] == ']') in_class_ = false;
    copy(1);
  }

  void character() {
    constexpr std::array<std::string_view, 7> kGroups = {"(?:",  "(?i:", "(?=", "(?!",
                                                         "(?<=", "(?<!", "(?>"};
    if (rest().starts_with("(?") || rest().starts_with("(*")) {
      const auto* group = std::find_if(kGroups.begin(), kGroups.end(), [&](std::string_view known) {
        return rest().starts_with(known);
      });
      if (group == kGroups.end()) refuse(4);
      copy(group->size());
    } else if (pattern_[at_] == '[') {
      in_class_ = true;
      copy(next() == '^' ? 2 : 1);
      if (rest().starts_with(']')) refuse(1);
    } else if (rest().starts_with("{,") ||
               // It repeats the repetition there, and makes it possessive in PCRE2.
               (rest().starts_with("}+") && syntax_ == SplitPattern::Syntax::kOniguruma)) {
      refuse(2);
    } else {
      copy(1);
    }
  }

  std::string_view pattern_;
  SplitPattern::Syntax syntax_;
  const std::string& where_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

template <typename T>
T* allocated(T* object) {
  if (object == nullptr) throw std::bad_alloc();
  return object;
}

uint32_t information(const pcre2_code* code, uint32_t what) {
  uint32_t value = 0;
  pcre2_pattern_info(code, what, &value);
  return value;
}

// PCRE2 calls this at every item of a careful code; another value than 0 ends the match with it.
int ask_time(pcre2_callout_block* /*place*/, void* time) {
  return static_cast<const MatchTime*>(time)->is_up() ? PCRE2_ERROR_CALLOUT : 0;
}

}  // namespace

void MatchTime::allow(size_t bytes) {
  allowed_ns_ = kTextNs + kByteNs * static_cast<int64_t>(bytes);
  wall_start_ns_ = read_clock(CLOCK_MONOTONIC_COARSE);
  cpu_start_ns_ = read_clock(CLOCK_THREAD_CPUTIME_ID);
}

// The clock of the processor takes a system call. It cannot be ahead of the other one, which takes
// none.
bool MatchTime::is_up() const {
  return read_clock(CLOCK_MONOTONIC_COARSE) - wall_start_ns_ > allowed_ns_ &&
         read_clock(CLOCK_THREAD_CPUTIME_ID) - cpu_start_ns_ > allowed_ns_;
}

void MatchScratch::Free::operator()(pcre2_match_context* context) const noexcept {
  pcre2_match_context_free(context);
}
void MatchScratch::Free::operator()(pcre2_match_data* data) const noexcept {
  pcre2_match_data_free(data);
}
void MatchScratch::Free::operator()(pcre2_jit_stack* stack) const noexcept {
  pcre2_jit_stack_free(stack);
}

MatchScratch::MatchScratch()
    : stack_(allocated(pcre2_jit_stack_create(kStackStart, kStackLimit, nullptr))),
      quick_(allocated(pcre2_match_context_create(nullptr))),
      careful_(allocated(pcre2_match_context_create(nullptr))),
      data_(allocated(pcre2_match_data_create(1, nullptr))) {
  begin_text(0);
  for (pcre2_match_context* context : {quick_.get(), careful_.get()}) {
    pcre2_jit_stack_assign(context, nullptr, stack_.get());
    pcre2_set_heap_limit(context, SplitPattern::kHeapKib);
  }
  pcre2_set_match_limit(quick_.get(), kQuickTries);
  pcre2_set_match_limit(careful_.get(), UINT32_MAX);  // its limit is the time
  pcre2_set_callout(careful_.get(), ask_time, &time_);
}

void SplitPattern::Free::operator()(pcre2_code* code) const noexcept {
  pcre2_code_free(code);
}

SplitPattern::SplitPattern(const std::string& pattern, Syntax syntax, const std::string& where)
    : where_(where), pattern_(pattern.substr(0, 200)) {
  const std::string rewritten = Rewriter(pattern, syntax, where).rewrite();
  // $ matches at the end of each line in Oniguruma, and at the end of the text alone in Rust.
  const uint32_t lines =
      syntax == Syntax::kOniguruma ? PCRE2_MULTILINE : uint32_t{PCRE2_DOLLAR_ENDONLY};
  quick_ = compile(rewritten, lines);
  careful_ = compile(rewritten, lines | PCRE2_AUTO_CALLOUT);
  if (information(quick_.get(), PCRE2_INFO_MATCHEMPTY) != 0) {
    fail(ExitCode::kData, "{}: the regular expression matches the empty string: {}", where,
         pattern_);
  }
  looks_back_ = information(quick_.get(), PCRE2_INFO_MAXLOOKBEHIND) > 0;
}

// Groups capture nothing, since nobody asks for it, and each would enlarge every step back.
SplitPattern::Code SplitPattern::compile(const std::string& rewritten, uint32_t options) const {
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      allocated(pcre2_compile_context_create(nullptr)), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  size_t offset = 0;
  Code code(pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(rewritten.data()), rewritten.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE | options, &error,
      &offset, context.get()));
  if (!code) {
    fail(ExitCode::kData, "{}: the regular expression is not supported: {} at byte {} of {}",
         where_, message_of(error), offset, rewritten.substr(0, 200));
  }
  // Where the system forbids writable code, PCRE2 interprets the pattern instead.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
  return code;
}

// The compiled code keeps what it may come back to on a stack of kStackLimit, the interpreter of
// PCRE2 on a heap of kHeapKib.
int SplitPattern::match(std::string_view text, size_t from, uint32_t options,
                        MatchScratch& scratch) const {
  const auto with = [&](const Code& code, pcre2_match_context* context, uint32_t more) {
    return pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       options | more, scratch.data_.get(), context);
  };
  int result = with(quick_, scratch.quick_.get(), 0);
  const auto gave_up = [&] {
    return result == PCRE2_ERROR_MATCHLIMIT || result == PCRE2_ERROR_JIT_STACKLIMIT ||
           result == PCRE2_ERROR_HEAPLIMIT;
  };
  if (gave_up()) result = with(careful_, scratch.careful_.get(), 0);
  if (gave_up()) result = with(careful_, scratch.careful_.get(), PCRE2_NO_JIT);
  return result;
}

void SplitPattern::give_up(int error, size_t bytes, const MatchScratch& scratch) const {
  std::string reason = message_of(error);
  if (error == PCRE2_ERROR_CALLOUT) {
    reason = fmt::format("it takes more than {:.1f} s for {} bytes",
                         1e-9 * static_cast<double>(scratch.time_.allowed_ns()), bytes);
  } else if (error == PCRE2_ERROR_HEAPLIMIT) {
    reason = fmt::format("it takes more than {} MiB for {} bytes", kHeapKib >> 10, bytes);
  }
  fail(ExitCode::kData, "{}: the regular expression cannot split the text: {}: {}", where_, reason,
       pattern_);
}

SplitPattern::Match SplitPattern::find(std::string_view text, size_t from, bool open,
                                       MatchScratch& scratch) const {
  const uint32_t options = PCRE2_NO_UTF_CHECK | (open ? PCRE2_PARTIAL_HARD : 0);
  const int result =
      scratch.time_.is_up() ? PCRE2_ERROR_CALLOUT : match(text, from, options, scratch);
  const size_t* const range = pcre2_get_ovector_pointer(scratch.data_.get());
  if (result >= 0) return {range[0], range[1], Match::Kind::kFound};
  if (result == PCRE2_ERROR_NOMATCH) return {text.size(), text.size(), Match::Kind::kNone};
  if (result == PCRE2_ERROR_PARTIAL) return {range[0], text.size(), Match::Kind::kUndecided};
  give_up(result, text.size(), scratch);
}

}  // namespace sbtrain
