// Needles in a haystack: RULER's scripts/data/synthetic/niah.py with the arguments of
// scripts/synthetic.yaml, and the same needles in a text of the user.
//
// RULER draws its words with replacement; here the keys of a prompt differ, so that one of them
// alone has the answer.
#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "core/error.h"
#include "eval/text_prompt.h"
#include "eval/word_list.h"

namespace sbtrain {
namespace {

constexpr const char* kRepeated =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

enum class Haystack : uint8_t { kRepeated, kNeedles, kText };

struct NeedleTask {
  TextTaskKind kind;
  Haystack haystack;
  bool uuid_keys = false;    // otherwise adjective-noun
  bool uuid_values = false;  // otherwise numbers of seven digits
  int64_t keys = 1;
  int64_t values = 1;   // of each key
  int64_t queries = 1;  // keys that are asked for

  bool single() const { return values * queries == 1; }
};

constexpr NeedleTask kTasks[] = {
    {TextTaskKind::kNiahSingle1, Haystack::kRepeated},
    {TextTaskKind::kNiahMultikey2, Haystack::kNeedles},
    {TextTaskKind::kNiahMultikey3, Haystack::kNeedles, true, true},
    {TextTaskKind::kNeedleLocalSingle, Haystack::kText},
    {TextTaskKind::kNeedleLocalUuid, Haystack::kText, false, true},
    {TextTaskKind::kNeedleLocalMultikey, Haystack::kText, false, false, 4},
    {TextTaskKind::kNeedleLocalMultivalue, Haystack::kText, false, false, 1, 4},
    {TextTaskKind::kNeedleLocalMultiquery, Haystack::kText, false, false, 4, 1, 4}};

// A random UUID of version 4.
std::string draw_uuid(Draws& draws) {
  const uint64_t high = (draws.bits64() & ~uint64_t{0xF000}) | 0x4000;
  const uint64_t low = (draws.bits64() & ~(uint64_t{3} << 62)) | uint64_t{1} << 63;
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xFFFF,
                     high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFF);
}

std::string draw_word(Draws& draws, const std::vector<std::string>& words) {
  return words[static_cast<size_t>(draws.below(static_cast<int64_t>(words.size())))];
}

// Keys and values that have not been drawn before.
class Names {
 public:
  explicit Names(const NeedleTask& task) : task_(task) {}
  std::string key(Draws& draws) {
    return unused(keys_, [&] {
      if (task_.uuid_keys) return draw_uuid(draws);
      const std::string adjective = draw_word(draws, adjectives());
      return adjective + "-" + draw_word(draws, nouns());
    });
  }
  std::string value(Draws& draws) {
    return unused(values_, [&] {
      return task_.uuid_values ? draw_uuid(draws) : std::to_string(1000000 + draws.below(9000000));
    });
  }

 private:
  static std::string unused(std::unordered_set<std::string>& used, const auto& draw) {
    while (true) {
      std::string name = draw();
      if (used.insert(name).second) return name;
    }
  }
  const NeedleTask& task_;
  std::unordered_set<std::string> keys_, values_;
};

struct Needle {
  int64_t key = 0;  // which of the prompt's keys
  std::string sentence;
};

// RULER's depths in essays: 40 of them, evenly from 0 to 100 percent, rounded.
int64_t sentence_at(int64_t depth, int64_t sentences) {
  const int64_t percent = std::llround(100.0 * static_cast<double>(depth) / 39);
  return sentences * percent / 100;
}
constexpr int64_t kDepths = 40;

class Needles : public PromptWriter {
 public:
  Needles(const TextTaskOptions& options, const NeedleTask& task)
      : PromptWriter(options), task_(task) {
    require(task.haystack != Haystack::kText || options.text, "{} without a text",
            name_of(options.kind));
  }

  int64_t tokens_to_generate() const override { return 128; }
  bool has_depth() const override { return task_.single(); }
  int64_t most_units() const override {
    if (task_.haystack == Haystack::kText) return options_.text->words();
    if (task_.haystack == Haystack::kNeedles && !task_.uuid_keys) return word_keys() - task_.keys;
    return PromptWriter::most_units();
  }
  std::string shortage() const override {
    if (task_.haystack == Haystack::kText) {
      return fmt::format("the text has {} words, which are too few", most_units());
    }
    return fmt::format("there are {} different keys, which are too few", word_keys());
  }

  TextPrompt write(int64_t length, int64_t index, int64_t units) const override {
    Draws random = draws("needles", length, index);
    Names names(task_);
    std::vector<std::string> keys;
    std::vector<std::vector<std::string>> values;
    std::vector<Needle> needles;
    for (int64_t k = 0; k < task_.keys; ++k) {
      keys.push_back(names.key(random));
      values.emplace_back();
      for (int64_t v = 0; v < task_.values; ++v) {
        values.back().push_back(names.value(random));
        needles.push_back({k, needle(keys.back(), values.back().back())});
      }
    }
    shuffle(random, needles);
    const std::vector<int32_t> asked = draw_distinct(random, 0, task_.keys, task_.queries);

    TextPrompt context = task_.haystack == Haystack::kText
                             ? in_text(needles, asked.front(), length, index, units)
                             : in_lines(needles.front(), names, length, index, units);
    TextPrompt prompt{.text = opening(), .depth = context.depth};
    prompt.needle = prompt.text.size() + context.needle;
    prompt.text += context.text + "\n" + question(keys, asked);
    for (const int32_t key : asked) {
      const std::vector<std::string>& of_key = values[static_cast<size_t>(key)];
      prompt.answers.insert(prompt.answers.end(), of_key.begin(), of_key.end());
    }
    return prompt;
  }

 private:
  static int64_t word_keys() { return static_cast<int64_t>(adjectives().size() * nouns().size()); }
  const char* kind() const { return task_.uuid_values ? "uuid" : "number"; }

  std::string needle(const std::string& key, const std::string& value) const {
    return fmt::format("One of the special magic {}s for {} is: {}.", kind(), key, value);
  }

  std::string opening() const {
    const bool one = task_.single();
    return fmt::format(
        "{0} special magic {1} {2} hidden within the following text. Make sure to memorize it. I "
        "will "
        "quiz you about the {1} afterwards.\n",
        one ? "A" : "Some", fmt::format("{}{}", kind(), one ? "" : "s"), one ? "is" : "are");
  }

  // The question, and the beginning of the answer.
  std::string question(const std::vector<std::string>& keys,
                       const std::vector<int32_t>& asked) const {
    std::string query = keys[static_cast<size_t>(asked.front())];
    for (size_t i = 1; i < asked.size(); ++i) {
      query += (i + 1 == asked.size() ? ", and " : ", ") + keys[static_cast<size_t>(asked[i])];
    }
    if (task_.single()) {
      return fmt::format(
          "What is the special magic {0} for {1} mentioned in the provided text? The special magic "
          "{0} for {1} mentioned in the provided text is",
          kind(), query);
    }
    return fmt::format(
        "What are all the special magic {0}s for {1} mentioned in the provided text? The special "
        "magic {0}s for {1} mentioned in the provided text are",
        kind(), query);
  }

  // One needle among lines of filler, or of needles for other keys.
  TextPrompt in_lines(const Needle& asked, Names& names, int64_t length, int64_t index,
                      int64_t units) const {
    Draws haystack = draws("haystack", length, index);
    Draws places = draws("place", length, index);
    // RULER draws from the places before each line; only a chosen depth may be after the last one.
    const int64_t at = place(places, index, options_.depths.empty() ? units : units + 1);
    TextPrompt context{.depth = static_cast<double>(at) / static_cast<double>(units)};
    for (int64_t line = 0; line <= units; ++line) {
      if (line == at) {
        context.needle = context.text.size();
        context.text += asked.sentence + "\n";
      }
      if (line == units) break;
      if (task_.haystack == Haystack::kRepeated) {
        context.text += kRepeated;
      } else {
        const std::string key = names.key(haystack);
        context.text += needle(key, names.value(haystack));
      }
      context.text += '\n';
    }
    context.text.pop_back();
    return context;
  }

  // Needles between the sentences of the text, at different depths.
  TextPrompt in_text(const std::vector<Needle>& needles, int64_t asked, int64_t length,
                     int64_t index, int64_t words) const {
    Draws places = draws("place", length, index);
    const int64_t sentences = options_.text->sentences(words);
    const std::vector<int32_t> depths =
        draw_distinct(places, 0, kDepths, static_cast<int64_t>(needles.size()));
    std::vector<std::pair<int64_t, const Needle*>> hidden;
    for (size_t i = 0; i < needles.size(); ++i) {
      hidden.emplace_back(sentence_at(depths[i], sentences), &needles[i]);
      if (task_.single() && needles[i].key == asked && !options_.depths.empty()) {
        hidden.back().first = place(places, index, sentences + 1);
      }
    }
    std::ranges::stable_sort(hidden, {}, [](const auto& at) { return at.first; });

    TextPrompt context;
    int64_t from = 0;
    const auto append = [&](const std::string& text) {
      if (!context.text.empty() && !text.empty()) context.text += ' ';
      context.text += text;
    };
    for (const auto& [at, needle] : hidden) {
      append(options_.text->between(words, from, at));
      from = at;
      append(needle->sentence);
      if (!task_.single() || needle->key != asked) continue;
      context.needle = context.text.size() - needle->sentence.size();
      context.depth = static_cast<double>(at) / static_cast<double>(sentences);
    }
    append(options_.text->between(words, from, sentences));
    return context;
  }

  const NeedleTask& task_;
};

}  // namespace

std::unique_ptr<PromptWriter> make_needles(const TextTaskOptions& options) {
  const auto* const task =
      std::ranges::find(kTasks, options.kind, [](const NeedleTask& t) { return t.kind; });
  require(task != std::end(kTasks), "{} has no needles", name_of(options.kind));
  return std::make_unique<Needles>(options, *task);
}

}  // namespace sbtrain
