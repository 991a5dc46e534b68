// Tasks in plain text that a model answers by continuing a prompt. docs/evaluation.md describes
// them.
//
//   passkey          Mohtashami and Jaggi, arXiv 2305.16300, as in CoCA, arXiv 2309.08646, appendix
//                    B.1, listing 1: a number of five digits between repetitions of a filler.
//   niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe
//                    RULER, arXiv 2404.06654: prompts, numbers of needles, tokens to generate and
//                    score of https://github.com/NVIDIA/RULER, scripts/data/synthetic and
//                    scripts/eval, as they were when the paper appeared.
//   needle_local_*   The same needles in a text of the user. RULER hides them in essays that cannot
//   be
//                    had here, so that these are not RULER's tasks.
//
// A sample depends only on the options, the tokenizer, the length and its index.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/enum_names.h"
#include "eval/local_text.h"

namespace sbtrain {

enum class TextTaskKind : uint8_t {
  kPasskey,
  kNiahSingle1,
  kNiahMultikey2,
  kNiahMultikey3,
  kVt,
  kCwe,
  kFwe,
  kNeedleLocalSingle,
  kNeedleLocalUuid,
  kNeedleLocalMultikey,
  kNeedleLocalMultivalue,
  kNeedleLocalMultiquery,
};
template <>
inline constexpr auto kNames<TextTaskKind> =
    enum_names<TextTaskKind>({{TextTaskKind::kPasskey, "passkey"},
                              {TextTaskKind::kNiahSingle1, "niah_single_1"},
                              {TextTaskKind::kNiahMultikey2, "niah_multikey_2"},
                              {TextTaskKind::kNiahMultikey3, "niah_multikey_3"},
                              {TextTaskKind::kVt, "vt"},
                              {TextTaskKind::kCwe, "cwe"},
                              {TextTaskKind::kFwe, "fwe"},
                              {TextTaskKind::kNeedleLocalSingle, "needle_local_single"},
                              {TextTaskKind::kNeedleLocalUuid, "needle_local_uuid"},
                              {TextTaskKind::kNeedleLocalMultikey, "needle_local_multikey"},
                              {TextTaskKind::kNeedleLocalMultivalue, "needle_local_multivalue"},
                              {TextTaskKind::kNeedleLocalMultiquery, "needle_local_multiquery"}});

// Whether the task needs TextTaskOptions::text.
bool needs_text(TextTaskKind kind);

struct TextTaskOptions {
  TextTaskKind kind = TextTaskKind::kPasskey;
  uint64_t seed = 42;
  // 0 .. 1: sample i hides what is asked for at the i-th of these depths, modulo their number.
  // Empty: at a place that is drawn, as published.
  std::vector<double> depths{};
  std::shared_ptr<const LocalText> text{};  // needle_local_*: where the needles are hidden
  std::vector<std::string> words{};         // cwe: the words of the lists; empty: eval/word_list.h
};

struct TextSample {
  std::vector<int32_t> prompt;
  std::vector<std::string> answers;  // in ASCII
  double depth = -1;  // the share of the filler before what is asked for; -1: more than one place
  int64_t position = 0;  // tokens before what is asked for, if there is a depth
  int64_t units = 0;     // of filler
};

class TextTask {
 public:
  // `encode` gives the tokens of a prompt, those included with which every document begins.
  using Encode = std::function<std::vector<int32_t>(const std::string&)>;
  TextTask(const TextTaskOptions& options, Encode encode);
  ~TextTask();

  TextTaskKind kind() const { return kind_; }
  int64_t tokens_to_generate() const;
  bool has_depth() const;

  // Why there are no such samples: something is too short. Empty if there are.
  std::string problem(int64_t length, int64_t samples) const;

  // With the most filler for which prompt and tokens to generate together have at most `length`
  // tokens, or with all filler that there is. Throws ExitCode::kUsage if problem() is not empty.
  TextSample sample(int64_t length, int64_t index) const;
  // The same sample's prompt and answers as text.
  std::pair<std::string, std::vector<std::string>> text(int64_t length, int64_t index) const;

 private:
  int64_t tokens(int64_t length, int64_t index, int64_t units) const;
  int64_t fitting_units(int64_t length, int64_t index) const;
  int64_t units_of_sample(int64_t length, int64_t index) const;

  TextTaskKind kind_;
  Encode encode_;
  std::unique_ptr<class PromptWriter> writer_;
};

}  // namespace sbtrain
