// How the prompts of text tasks are written: one class for each kind of task.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/draws.h"
#include "eval/text_task.h"

namespace sbtrain {

struct TextPrompt {
  std::string text{};
  std::vector<std::string> answers{};
  double depth =
      -1;  // the share of the filler before the needle that is asked for; -1: no such needle
  size_t needle = 0;  // the byte at which this needle begins
};

// Tokens of a text, those included with which every prompt begins.
using CountTokens = std::function<int64_t(const std::string&)>;

class PromptWriter {
 public:
  explicit PromptWriter(const TextTaskOptions& options) : options_(options) {}
  virtual ~PromptWriter() = default;

  virtual int64_t tokens_to_generate() const = 0;
  // Whether an answer is a single needle, whose place can be chosen.
  virtual bool has_depth() const { return false; }
  // The smallest and the largest prompt, in units of filler.
  virtual int64_t fewest_units() const { return 1; }
  virtual int64_t most_units() const { return std::numeric_limits<int64_t>::max(); }
  // What has run out if more units than most_units() are needed, and what to do about it.
  virtual std::string shortage() const { return {}; }
  // Sample `index` for a length in tokens, with so many units of filler. What is drawn does not
  // depend on `units`, only what it is scaled to: a needle stays at its depth.
  virtual TextPrompt write(int64_t length, int64_t index, int64_t units) const = 0;

 protected:
  // The random numbers of one part of a sample.
  Draws draws(std::string_view part, int64_t length, int64_t index) const;
  // 0 .. places - 1: the chosen depth of this sample, or drawn uniformly.
  int64_t place(Draws& draws, int64_t index, int64_t places) const;

  TextTaskOptions options_;
};

// The writer of options.kind, of those below.
std::unique_ptr<PromptWriter> make_writer(const TextTaskOptions& options, const CountTokens& count);

std::unique_ptr<PromptWriter> make_passkey(const TextTaskOptions& options);
std::unique_ptr<PromptWriter> make_needles(const TextTaskOptions& options);
std::unique_ptr<PromptWriter> make_variable_tracking(const TextTaskOptions& options,
                                                     const CountTokens& count);
std::unique_ptr<PromptWriter> make_common_words(const TextTaskOptions& options);
std::unique_ptr<PromptWriter> make_frequent_words(const TextTaskOptions& options);

}  // namespace sbtrain
