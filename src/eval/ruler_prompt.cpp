// Three tasks of RULER: variable tracking, common words and frequent words, after
// scripts/data/synthetic/{variable_tracking,common_words_extraction,freq_words_extraction}.py with
// the arguments of scripts/synthetic.yaml and the templates of constants.py, their spelling
// included.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <set>

#include "core/error.h"
#include "eval/text_prompt.h"
#include "eval/word_list.h"

namespace sbtrain {
namespace {

// `count` different words of `letters` letters, the first of which is `first`.
std::vector<std::string> draw_letters(Draws& draws, char first, int64_t letters, int64_t count) {
  std::vector<std::string> words;
  std::set<std::string> used;
  while (static_cast<int64_t>(words.size()) < count) {
    std::string word;
    for (int64_t i = 0; i < letters; ++i) word += static_cast<char>(first + draws.below(26));
    if (used.insert(word).second) words.push_back(std::move(word));
  }
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

// ---- vt: one chain of five variables

constexpr int64_t kVariables = 5;  // one value and four hops

struct Chain {
  std::vector<std::string> variables;
  std::string value;

  // "VAR A = 12345", "VAR B = VAR A ", ...
  std::string statement(size_t i) const {
    return i == 0 ? fmt::format("VAR {} = {}", variables[0], value)
                  : fmt::format("VAR {} = VAR {} ", variables[i], variables[i - 1]);
  }
};

std::vector<std::string> noise(int64_t lines) {
  constexpr const char* kLine =
      "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";
  if (lines > kVariables) return std::vector<std::string>(static_cast<size_t>(lines), kLine);
  // So few lines are taken apart, to have enough places.
  std::vector<std::string> sentences;
  for (int64_t i = 0; i < lines; ++i) {
    sentences.insert(sentences.end(),
                     {"The grass is green.", " The sky is blue.", " The sun is yellow.",
                      " Here we go.", " There and back again.", "\n"});
  }
  return sentences;
}

// The statements in their order, at different places among the lines of noise, and the question.
std::string tracking_prompt(const Chain& chain, Draws places, int64_t lines) {
  std::vector<std::string> sentences = noise(lines);
  std::vector<int32_t> at =
      draw_distinct(places, 0, static_cast<int64_t>(sentences.size()), kVariables);
  std::sort(at.begin(), at.end());
  for (size_t i = 0; i < at.size(); ++i) {
    sentences.insert(sentences.begin() + at[i] + static_cast<int64_t>(i), chain.statement(i));
  }
  std::string context = joined(sentences);
  replace_all(context, ". \n", ".\n");
  return fmt::format(
      "Memorize and track the chain(s) of variable assignment hidden in the following "
      "text.\n\n{0}\n"
      "Question: Find all variables that are assigned the value {1} in the text above. Answer: "
      "According to the chain(s) of variable assignment in the text above, {2} variables are "
      "assgined "
      "the value {1}, they are: ",
      context, chain.value, kVariables);
}

class VariableTracking : public PromptWriter {
 public:
  VariableTracking(const TextTaskOptions& options, const CountTokens& count)
      : PromptWriter(options) {
    // RULER fits the solved example to 500 tokens, those to generate included, in steps of five.
    constexpr int64_t kExampleTokens = 500, kStep = 5;
    example_lines_ = kStep;
    while (count(example(0, 0, example_lines_ + kStep, false)) + tokens_to_generate() <=
           kExampleTokens) {
      example_lines_ += kStep;
    }
  }
  int64_t tokens_to_generate() const override { return 30; }

  TextPrompt write(int64_t length, int64_t index, int64_t units) const override {
    Draws random = draws("chain", length, index);
    const Chain chain = draw_chain(random, 5);
    return {.text = example(length, index, example_lines_, true) + "\n\n\n\n" +
                    tracking_prompt(chain, draws("places", length, index), units),
            .answers = chain.variables};
  }

 private:
  static Chain draw_chain(Draws& random, int64_t letters) {
    Chain chain{.variables = draw_letters(random, 'A', letters, kVariables), .value = {}};
    chain.value = std::to_string(10000 + random.below(89999));
    return chain;
  }

  // The solved example: all samples have the same one, but for the names of its variables.
  std::string example(int64_t length, int64_t index, int64_t lines, bool solved) const {
    Draws common = draws("example", 0, 0);
    Chain chain = draw_chain(common, 3);
    Draws random = draws("names of the example", length, index);
    chain.variables = draw_letters(random, 'A', 3, kVariables);
    const std::string prompt = tracking_prompt(chain, common, lines);
    return solved ? prompt + " " + joined(chain.variables) : prompt;
  }

  int64_t example_lines_ = 0;
};

// ---- cwe: ten words that a list repeats more often than the others

constexpr int64_t kCommonWords = 10;
constexpr int64_t kLongLists = 4096;  // tokens from which on lists repeat their words more often

struct WordList {
  std::string text;
  std::vector<std::string> common;
};

std::string numbered(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, words[i]);
  }
  return text;
}

std::string list_prompt(const std::string& list) {
  return fmt::format(
      "Below is a numbered list of words. In these words, some appear more often than others. "
      "Memorize the ones that appear most often.\n{}\nQuestion: What are the 10 most common words "
      "in "
      "the above list? Answer: The top 10 words that appear most often in the list are:",
      list);
}

class CommonWords : public PromptWriter {
 public:
  explicit CommonWords(const TextTaskOptions& options) : PromptWriter(options) {
    if (!options_.words.empty()) return;
    for (const auto* part : {&nouns(), &adjectives(), &verbs()}) {
      options_.words.insert(options_.words.end(), part->begin(), part->end());
    }
  }
  int64_t tokens_to_generate() const override { return 120; }
  // The number of different words, of which there must be a rare one, and enough for the example.
  int64_t fewest_units() const override { return kCommonWords + 1; }
  int64_t most_units() const override { return static_cast<int64_t>(options_.words.size()); }
  std::string shortage() const override {
    return fmt::format("the list of words has {} words, which are too few", most_units());
  }

  TextPrompt write(int64_t length, int64_t index, int64_t units) const override {
    const bool is_long = length >= kLongLists;
    const WordList example =
        draw_list("example", length, index, is_long ? 40 : 20, is_long ? 10 : 3, is_long ? 3 : 1);
    const WordList list =
        draw_list("list", length, index, units, is_long ? 30 : 6, is_long ? 3 : 1);
    return {.text = list_prompt(example.text) + numbered(example.common) + "\n" +
                    list_prompt(list.text),
            .answers = list.common};
  }

 private:
  WordList draw_list(const std::string& part, int64_t length, int64_t index, int64_t different,
                     int64_t common_times, int64_t rare_times) const {
    Draws random = draws(part, length, index);
    const std::vector<int32_t> drawn = draw_distinct(random, 0, most_units(), different);
    WordList list;
    std::vector<std::string> words;
    for (size_t i = 0; i < drawn.size(); ++i) {
      const std::string& word = options_.words[static_cast<size_t>(drawn[i])];
      const bool common = static_cast<int64_t>(i) < kCommonWords;
      if (common) list.common.push_back(word);
      words.insert(words.end(), static_cast<size_t>(common ? common_times : rare_times), word);
    }
    Draws order = draws(part + ", order", length, index);
    shuffle(order, words);
    list.text = numbered(words);
    return list;
  }
};

// ---- fwe: the three most frequent of invented words

class FrequentWords : public PromptWriter {
 public:
  using PromptWriter::PromptWriter;
  int64_t tokens_to_generate() const override { return 50; }
  // From here on the third word stands in the text more often than the fourth.
  int64_t fewest_units() const override { return 74; }

  // The word of rank k = 1, 2, ... occurs floor(units / (zeta(2) k^2)) times. The first rank is the
  // noise "...", and the answer ranks 2 to 4.
  TextPrompt write(int64_t length, int64_t index, int64_t units) const override {
    Draws random = draws("words", length, index);
    std::vector<std::string> ranked =
        draw_letters(random, 'a', 6, std::max<int64_t>(5, length / 50));
    ranked.front() = "...";
    std::vector<std::string> words;
    for (size_t i = 0; i < ranked.size(); ++i) {
      words.insert(words.end(), times(units, static_cast<double>(i + 1)), ranked[i]);
    }
    Draws order = draws("order", length, index);
    shuffle(order, words);
    return {
        .text = fmt::format(
            "Read the following coded text and track the frequency of each coded word. Find the "
            "three most frequently appeared coded words. {}\nQuestion: Do not provide any "
            "explanation. Please ignore the dots '....'. What are the three most frequently "
            "appeared words in the above coded text? Answer: According to the coded text above, "
            "the three most frequently appeared words are:",
            joined(words)),
        .answers = {ranked.begin() + 1, ranked.begin() + 4}};
  }

 private:
  static size_t times(int64_t units, double rank) {
    constexpr double kZeta2 = std::numbers::pi * std::numbers::pi / 6;
    return static_cast<size_t>(static_cast<double>(units) / (rank * rank) / kZeta2);
  }
};

}  // namespace

std::unique_ptr<PromptWriter> make_variable_tracking(const TextTaskOptions& options,
                                                     const CountTokens& count) {
  return std::make_unique<VariableTracking>(options, count);
}

std::unique_ptr<PromptWriter> make_common_words(const TextTaskOptions& options) {
  return std::make_unique<CommonWords>(options);
}

std::unique_ptr<PromptWriter> make_frequent_words(const TextTaskOptions& options) {
  return std::make_unique<FrequentWords>(options);
}

}  // namespace sbtrain
