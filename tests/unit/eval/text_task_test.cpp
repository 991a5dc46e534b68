// The samples of text tasks, against the definitions of the tasks.
#include "eval/text_task.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numbers>
#include <regex>
#include <set>
#include <sstream>

#include "core/error.h"
#include "eval/text_prompt.h"
#include "eval/text_scores.h"
#include "eval/word_list.h"
#include "support/process.h"

namespace sbtrain {
namespace {

using Words = std::vector<std::string>;

// ---- A tokenizer of words

// A token for every word, after a bos.
std::vector<int32_t> encode(const std::string& text) {
  std::vector<int32_t> tokens = {1};
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    tokens.push_back(static_cast<int32_t>(hash_name(word) % 100000));
  }
  return tokens;
}

Words words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// ---- Samples as text

std::shared_ptr<const LocalText> haystack() {
  std::string text;
  for (int i = 0; i < 6000; ++i) {
    text += fmt::format("w{}{}", i, i % 7 == 6 ? ".\n" : i % 31 == 30 ? "?\" " : " ");
  }
  return std::make_shared<LocalText>(text);
}

TextTaskOptions options_of(TextTaskKind kind) {
  TextTaskOptions options{.kind = kind};
  if (needs_text(kind)) options.text = haystack();
  return options;
}

std::unique_ptr<PromptWriter> writer_of(const TextTaskOptions& options) {
  return make_writer(
      options, [](const std::string& text) { return static_cast<int64_t>(encode(text).size()); });
}

TextPrompt prompt_of(TextTaskKind kind, int64_t length, int64_t index, int64_t units) {
  return writer_of(options_of(kind))->write(length, index, units);
}

std::vector<TextTaskKind> all_kinds() {
  std::vector<TextTaskKind> kinds;
  for (const auto& entry : kNames<TextTaskKind>) kinds.push_back(entry.value);
  return kinds;
}

int64_t count(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// All matches of the pattern's first group.
Words matches(const std::string& text, const std::string& pattern) {
  Words found;
  const std::regex expression(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), expression), end; at != end; ++at) {
    found.push_back((*at)[1]);
  }
  return found;
}

std::string between(const std::string& text, const std::string& from, const std::string& to) {
  const size_t begin = text.rfind(from) + from.size();
  return text.substr(begin, text.find(to, begin) - begin);
}

// ---- All tasks

// tests/interop/ruler_test.py checks the same prompts against RULER's own code.
TEST(TextTask, SamplesAreThoseOfTheGoldenFile) {
  const std::string path = std::string(SBTRAIN_TEST_DATA) + "/text_tasks/samples.json";
  nlohmann::ordered_json samples = nlohmann::ordered_json::array();
  for (const TextTaskKind kind : all_kinds()) {
    const auto writer = writer_of(options_of(kind));
    // Smallest prompts, and for most tasks larger ones.
    std::vector<int64_t> more = {0, 4};
    if (kind == TextTaskKind::kVt) more = {2, 7};
    if (kind == TextTaskKind::kCwe || kind == TextTaskKind::kFwe || needs_text(kind)) more = {40};
    for (const int64_t m : more) {
      const int64_t length = 1024, index = 3 + m, units = writer->fewest_units() + m;
      const TextPrompt prompt = writer->write(length, index, units);
      samples.push_back({{"task", name_of(kind)},
                         {"length", length},
                         {"index", index},
                         {"units", units},
                         {"tokens_to_generate", writer->tokens_to_generate()},
                         {"depth", prompt.depth},
                         {"needle", prompt.needle},
                         {"answers", prompt.answers},
                         {"prompt", prompt.text}});
    }
  }
  if (std::getenv("SBTRAIN_WRITE_GOLDEN") != nullptr) {
    test::write_file(path, samples.dump(1) + "\n");
  }
  const auto golden = nlohmann::ordered_json::parse(test::read_file(path));
  ASSERT_EQ(golden.size(), samples.size());
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(golden[i], samples[i]);
}

TEST(TextTask, PromptsFillTheLengthAndNeverExceedIt) {
  for (const TextTaskKind kind : all_kinds()) {
    const TextTask task(options_of(kind), encode);
    const auto writer = writer_of(options_of(kind));
    for (const int64_t length : {400, 700, 1300, 2049, 4096, 5000}) {
      SCOPED_TRACE(fmt::format("{} of {}", name_of(kind), length));
      if (!task.problem(length, 4).empty()) {
        EXPECT_LT(length, 1300) << task.problem(length, 4);
        continue;
      }
      for (int64_t index = 0; index < 4; ++index) {
        const TextSample sample = task.sample(length, index);
        EXPECT_LE(static_cast<int64_t>(sample.prompt.size()) + task.tokens_to_generate(), length);
        const TextPrompt longer = writer->write(length, index, sample.units + 1);
        EXPECT_GT(static_cast<int64_t>(encode(longer.text).size()) + task.tokens_to_generate(),
                  length);
      }
    }
  }
}

TEST(TextTask, SamplesDependOnSeedTaskLengthAndIndexAlone) {
  std::set<std::vector<int32_t>> prompts;
  for (const uint64_t seed : {1, 2}) {
    for (const TextTaskKind kind : all_kinds()) {
      TextTaskOptions options = options_of(kind);
      options.seed = seed;
      const TextTask task(options, encode);
      for (const int64_t length : {1500, 1700}) {
        for (int64_t index = 0; index < 3; ++index) {
          const TextSample sample = task.sample(length, index);
          EXPECT_TRUE(prompts.insert(sample.prompt).second) << name_of(kind);
          EXPECT_EQ(TextTask(options, encode).sample(length, index).prompt, sample.prompt);
        }
      }
    }
  }
}

TEST(TextTask, KnowsDepthAndPosition) {
  const std::map<TextTaskKind, std::string> first = {{TextTaskKind::kPasskey, "The"}};
  for (const TextTaskKind kind : all_kinds()) {
    SCOPED_TRACE(name_of(kind));
    TextTaskOptions options = options_of(kind);
    options.depths = {0, 0.5, 1};
    const TextTask task(options, encode);
    for (int64_t index = 0; index < 6; ++index) {
      const TextSample sample = task.sample(1500, index);
      EXPECT_EQ(sample.depth >= 0, task.has_depth());
      if (!task.has_depth()) continue;
      EXPECT_NEAR(sample.depth, static_cast<double>(index % 3) / 2,
                  0.51 / static_cast<double>(std::min<int64_t>(sample.units, 20)));
      // The needle begins at this token.
      const auto stands = std::find(sample.prompt.begin(), sample.prompt.end(),
                                    encode(kind == TextTaskKind::kPasskey ? "passkey" : "One")[1]);
      const int64_t at = stands - sample.prompt.begin() - (kind == TextTaskKind::kPasskey ? 1 : 0);
      if (kind != TextTaskKind::kNiahMultikey2 && kind != TextTaskKind::kNiahMultikey3 &&
          kind != TextTaskKind::kNeedleLocalMultikey) {
        EXPECT_EQ(sample.position, at);
      }
    }
  }
}

TEST(TextTask, DrawsEveryDepth) {
  for (const TextTaskKind kind :
       {TextTaskKind::kPasskey, TextTaskKind::kNiahSingle1, TextTaskKind::kNeedleLocalSingle}) {
    const TextTask task(options_of(kind), encode);
    std::vector<int> tenths(10);
    for (int64_t index = 0; index < 300; ++index) {
      const double depth = task.sample(1500, index).depth;
      ASSERT_GE(depth, 0);
      ASSERT_LE(depth, 1);
      ++tenths[static_cast<size_t>(std::min(9.0, depth * 10))];
    }
    EXPECT_GT(*std::ranges::min_element(tenths), 10) << name_of(kind);
  }
}

TEST(TextTask, SaysWhatIsTooShort) {
  const TextTask vt(options_of(TextTaskKind::kVt), encode);
  EXPECT_NE(vt.problem(200, 2).find("vt needs"), std::string::npos) << vt.problem(200, 2);
  EXPECT_THROW(vt.sample(200, 0), Error);
  const TextTask local(options_of(TextTaskKind::kNeedleLocalSingle), encode);
  EXPECT_EQ(local.problem(3000, 2), "");
  EXPECT_EQ(local.problem(7000, 2), "the text has 6000 words, which are too few");
  const TextTask keys(options_of(TextTaskKind::kNiahMultikey2), encode);
  EXPECT_NE(keys.problem(40'000'000, 1).find("different keys, which are too few"),
            std::string::npos)
      << keys.problem(40'000'000, 1);
  TextTaskOptions few = options_of(TextTaskKind::kCwe);
  few.words = {adjectives().begin(), adjectives().begin() + 50};
  EXPECT_EQ(TextTask(few, encode).problem(3000, 2),
            "the list of words has 50 words, which are too few");
}

// ---- Single tasks

TEST(Passkey, HidesOneKeyAmongTheFiller) {
  for (int64_t index = 0; index < 20; ++index) {
    const auto [text, answers, depth, needle] = prompt_of(TextTaskKind::kPasskey, 512, index, 9);
    ASSERT_EQ(answers.size(), 1U);
    const int key = std::stoi(answers[0]);
    EXPECT_GE(key, 10000);
    EXPECT_LE(key, 99999);
    EXPECT_EQ(count(text, answers[0]), 2);
    EXPECT_EQ(count(text, "The grass is green."), 9);
    EXPECT_EQ(count(text.substr(0, needle), "The grass is green."), std::lround(depth * 9));
    EXPECT_TRUE(text.ends_with("\nWhat is the passkey?"));
  }
}

TEST(Needles, DifferAndOneHasTheAnswer) {
  const std::string uuid = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}";
  struct Case {
    TextTaskKind kind;
    std::string key, value;
    size_t needles;
  };
  const std::vector<Case> cases = {
      {TextTaskKind::kNiahSingle1, "[a-z]+-[a-z]+", "[1-9][0-9]{6}", 1},
      {TextTaskKind::kNiahMultikey2, "[a-z]+-[a-z]+", "[1-9][0-9]{6}", 31},
      {TextTaskKind::kNiahMultikey3, uuid, uuid, 31}};
  for (const auto& [kind, key, value, needles] : cases) {
    SCOPED_TRACE(name_of(kind));
    for (int64_t index = 0; index < 10; ++index) {
      const TextPrompt prompt = prompt_of(kind, 512, index, 30);
      const std::string sentence = "One of the special magic (?:number|uuid)s for ";
      const Words keys =
          matches(prompt.text, fmt::format("{}({}) is: {}\\.", sentence, key, value));
      EXPECT_EQ(keys.size(), needles);
      EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), needles);
      const std::string query = between(prompt.text, "What is the special magic ", " mentioned");
      const std::string asked = query.substr(query.find(" for ") + 5);
      const Words values =
          matches(prompt.text, fmt::format("{}{} is: ({})\\.", sentence, asked, value));
      EXPECT_EQ(values, prompt.answers);
      EXPECT_EQ(std::ranges::count(prompt.text, '\n'), 32);  // opening, 31 lines, question
    }
  }
}

TEST(Needles, StandBetweenTheSentencesOfTheText) {
  const auto text = haystack();
  for (const TextTaskKind kind :
       {TextTaskKind::kNeedleLocalSingle, TextTaskKind::kNeedleLocalUuid,
        TextTaskKind::kNeedleLocalMultikey, TextTaskKind::kNeedleLocalMultivalue,
        TextTaskKind::kNeedleLocalMultiquery}) {
    SCOPED_TRACE(name_of(kind));
    for (int64_t index = 0; index < 5; ++index) {
      std::string prompt = prompt_of(kind, 512, index, 500).text;
      const std::regex needle("One of the special magic \\w+s for [^ ]+ is: [^ ]+\\.");
      const auto hidden = std::distance(std::sregex_iterator(prompt.begin(), prompt.end(), needle),
                                        std::sregex_iterator());
      EXPECT_EQ(hidden,
                kind == TextTaskKind::kNeedleLocalSingle || kind == TextTaskKind::kNeedleLocalUuid
                    ? 1
                    : 4);
      // Without the needles the text is whole.
      const std::string left = std::regex_replace(prompt, needle, "");
      const size_t begin = left.find('\n') + 1;
      EXPECT_EQ(words_of(left.substr(begin, left.rfind('\n') - begin)),
                words_of(text->between(500, 0, text->sentences(500))));
    }
  }
}

TEST(Needles, OfSeveralAnswersAreAllAskedFor) {
  const TextPrompt values = prompt_of(TextTaskKind::kNeedleLocalMultivalue, 512, 0, 300);
  EXPECT_EQ(values.answers.size(), 4U);
  const TextPrompt queries = prompt_of(TextTaskKind::kNeedleLocalMultiquery, 512, 0, 300);
  EXPECT_EQ(queries.answers.size(), 4U);
  const std::string asked =
      between(queries.text, "What are all the special magic numbers for ", " mentioned");
  EXPECT_EQ(count(asked, ", "), 3);
  EXPECT_EQ(count(asked, ", and "), 1);
  const TextPrompt keys = prompt_of(TextTaskKind::kNeedleLocalMultikey, 512, 0, 300);
  EXPECT_EQ(keys.answers.size(), 1U);
  EXPECT_EQ(keys.text.substr(keys.needle, 24), "One of the special magic");
  EXPECT_NE(keys.text.find(keys.answers[0], keys.needle), std::string::npos);
}

TEST(VariableTracking, IsOneChainInItsOrder) {
  for (int64_t index = 0; index < 10; ++index) {
    for (const int64_t lines : {1, 4, 20}) {
      const auto [text, answers, depth, needle] = prompt_of(TextTaskKind::kVt, 1024, index, lines);
      ASSERT_EQ(answers.size(), 5U);
      const size_t start = text.rfind("Memorize and track");
      ASSERT_GT(start, 0U);  // after the solved example
      const std::string question = text.substr(start);
      const std::string value = between(question, "are assigned the value ", " in the text");
      size_t at = question.find(fmt::format("VAR {} = {}", answers[0], value));
      for (size_t i = 1; i < answers.size(); ++i) {
        ASSERT_NE(at, std::string::npos);
        at = question.find(fmt::format("VAR {} = VAR {}", answers[i], answers[i - 1]), at + 1);
      }
      EXPECT_NE(at, std::string::npos);
      EXPECT_EQ(matches(question, "(VAR [A-Z]{5} =)").size(), 5U);
      EXPECT_EQ(count(question, "The grass is green."), lines);
      EXPECT_TRUE(question.ends_with("they are: "));
      const std::string example = text.substr(0, start);
      const Words names = matches(example, "VAR ([A-Z]{3}) =");
      EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 5U);
      EXPECT_EQ(words_of(between(example, "they are: ", "\n")), names);
    }
  }
}

void expect_list(const std::string& text, const Words& common, int common_times, int other_times,
                 size_t different) {
  const Words words = matches(text, "[0-9]+\\. ([a-z]+)");
  const Words numbers = matches(text, "([0-9]+)\\. [a-z]+");
  for (size_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(numbers[i], std::to_string(i + 1));
  std::map<std::string, int> counts;
  for (const std::string& word : words) ++counts[word];
  EXPECT_EQ(counts.size(), different);
  for (const auto& [word, times] : counts) {
    const bool is_common = std::ranges::find(common, word) != common.end();
    EXPECT_EQ(times, is_common ? common_times : other_times) << word;
  }
}

TEST(CommonWords, RepeatsTenWordsMoreOften) {
  for (const int64_t length : {2048, 4096}) {
    const bool is_long = length == 4096;
    const auto [text, answers, depth, needle] = prompt_of(TextTaskKind::kCwe, length, 1, 60);
    ASSERT_EQ(answers.size(), 10U);
    const size_t second = text.rfind("Below is a numbered list");
    const std::string example = text.substr(0, second);
    EXPECT_TRUE(text.ends_with("in the list are:"));
    const Words solved = matches(between(example, "in the list are:", "\n"), "[0-9]+\\. ([a-z]+)");
    EXPECT_EQ(solved.size(), 10U);
    expect_list(between(text, "most often.\n", "\nQuestion"), answers, is_long ? 30 : 6,
                is_long ? 3 : 1, 60);
    expect_list(between(example, "most often.\n", "\nQuestion"), solved, is_long ? 10 : 3,
                is_long ? 3 : 1, is_long ? 40 : 20);
  }
}

TEST(CommonWords, NoWordIsPartOfAnother) {
  Words all = nouns();
  all.insert(all.end(), adjectives().begin(), adjectives().end());
  all.insert(all.end(), verbs().begin(), verbs().end());
  EXPECT_EQ(all.size(), 1149U);
  for (const std::string& word : all) {
    EXPECT_TRUE(std::ranges::all_of(word, [](char c) { return c >= 'a' && c <= 'z'; })) << word;
    EXPECT_EQ(std::ranges::count_if(
                  all, [&](const std::string& w) { return w.find(word) != std::string::npos; }),
              1)
        << word;
  }
}

TEST(FrequentWords, FollowTheZetaDistribution) {
  for (const int64_t units : {74, 83, 106, 500, 3000}) {
    const auto [text, answers, depth, needle] = prompt_of(TextTaskKind::kFwe, 2048, 2, units);
    std::map<std::string, int> counts;
    for (const std::string& word :
         words_of(between(text, "appeared coded words. ", "\nQuestion"))) {
      ++counts[word];
    }
    std::vector<std::pair<int, std::string>> ranked;
    for (const auto& [word, times] : counts) ranked.emplace_back(-times, word);
    std::sort(ranked.begin(), ranked.end());
    ASSERT_GE(ranked.size(), 5U);
    for (size_t i = 0; i < ranked.size(); ++i) {
      const auto k = static_cast<double>(i + 1);
      EXPECT_EQ(-ranked[i].first, std::floor(static_cast<double>(units) * 6 /
                                             (std::numbers::pi * std::numbers::pi) / (k * k)));
    }
    EXPECT_EQ(ranked[0].second, "...");
    EXPECT_EQ(answers, (Words{ranked[1].second, ranked[2].second, ranked[3].second}));
    EXPECT_LT(ranked[3].first, ranked[4].first);  // the third answer is not a tie
  }
}

TEST(FrequentWords, HaveNoTieFromTheFewestOn) {
  const auto writer = writer_of(options_of(TextTaskKind::kFwe));
  for (int64_t units = writer->fewest_units(); units < 4000; ++units) {
    const double share = static_cast<double>(units) * 6 / (std::numbers::pi * std::numbers::pi);
    ASSERT_GT(std::floor(share / 16), std::floor(share / 25)) << units;
  }
}

// ---- Models that know, and models that guess

// Answers from the text of the prompt alone.
std::string read_answer(const std::string& text) {
  if (text.ends_with("What is the passkey?")) return matches(text, "passkey is ([0-9]{5})").front();
  std::string answer;
  if (text.find("VAR ") != std::string::npos) {
    const std::string question = text.substr(text.rfind("Memorize and track"));
    for (const std::string& name : matches(question, "VAR ([A-Z]{5}) =")) answer += name + " ";
    return answer;
  }
  if (text.starts_with("Below is") || text.starts_with("Read the")) {
    const bool list = text.starts_with("Below is");
    std::map<std::string, int> counts;
    const std::string context = list ? between(text, "most often.\n", "\nQuestion")
                                     : between(text, "appeared coded words. ", "\nQuestion");
    for (const std::string& word : matches(context, "([a-z]+)")) ++counts[word];
    std::vector<std::pair<int, std::string>> ranked;
    for (const auto& [word, times] : counts) ranked.emplace_back(-times, word);
    std::sort(ranked.begin(), ranked.end());
    for (size_t i = 0; i < (list ? 10U : 3U); ++i) answer += ranked[i].second + ", ";
    return answer;
  }
  for (const std::string& key :
       matches(text.substr(text.rfind("\nWhat ")),
               "(?: for |, (?:and )?)((?:[0-9a-f]|[a-z])[-0-9a-z]+-[0-9a-z]+)")) {
    for (const std::string& value : matches(text, " for " + key + " is: ([-0-9a-f]+)\\.")) {
      answer += value + " ";
    }
  }
  return answer;
}

// A task whose tokenizer remembers the texts that it has encoded, so that a model can read them.
struct ReadableTask {
  explicit ReadableTask(const TextTaskOptions& options)
      : task(options, [this](const std::string& text) {
          std::vector<int32_t> tokens = encode(text);
          const std::lock_guard lock(mutex);
          texts[tokens] = text;
          return tokens;
        }) {}
  std::mutex mutex;  // samples are made by several threads
  std::map<std::vector<int32_t>, std::string> texts;
  TextTask task;
};

double mean_of(ReadableTask& readable, int64_t length, int64_t samples, const auto& answer) {
  const auto ranks = make_single_control();
  const auto scores =
      score_samples(*ranks, readable.task, length, samples, /*together=*/7,
                    [&](std::span<const TextSample> prompts, int64_t) {
                      std::vector<Continuation> answers;
                      for (const TextSample& sample : prompts) {
                        answers.push_back({answer(readable.texts.at(sample.prompt)), 1});
                      }
                      return answers;
                    });
  EXPECT_EQ(static_cast<int64_t>(scores.size()), samples);
  return mean_score(scores).mean;
}

TEST(TextTask, AModelThatReadsThePromptScoresOne) {
  for (const TextTaskKind kind : all_kinds()) {
    ReadableTask readable(options_of(kind));
    EXPECT_EQ(mean_of(readable, 1500, 10, read_answer), 1) << name_of(kind);
  }
}

TEST(TextTask, AModelThatGuessesScoresChance) {
  // It names the value of any line.
  ReadableTask needles(options_of(TextTaskKind::kNiahMultikey2));
  Draws random(Philox(1, RandomPurpose::kTest, "guess"));
  double chance = 0;
  const double guessed = mean_of(needles, 320, 400, [&](const std::string& text) {
    const Words values = matches(text, " is: ([0-9]{7})\\.");
    chance += 1.0 / static_cast<double>(values.size()) / 400;
    return values[static_cast<size_t>(random.below(static_cast<int64_t>(values.size())))];
  });
  EXPECT_LT(chance, 0.2);
  EXPECT_NEAR(guessed, chance, 4 * std::sqrt(chance * (1 - chance) / 400));
  // It names ten words of the list, of which ten are common.
  ReadableTask words(options_of(TextTaskKind::kCwe));
  const int64_t different = words.task.sample(2048, 0).units;
  const double shares = mean_of(words, 2048, 100, [&](const std::string& text) {
    Words list = matches(between(text, "most often.\n", "\nQuestion"), "([a-z]+)");
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    shuffle_front(random, list, 10);
    return fmt::format("{}", fmt::join(list.begin(), list.begin() + 10, " "));
  });
  EXPECT_NEAR(shares, 10.0 / static_cast<double>(different), 0.01);
  // Five digits are right once in 90000 times.
  ReadableTask passkey(options_of(TextTaskKind::kPasskey));
  EXPECT_EQ(mean_of(passkey, 512, 100, [](const std::string&) { return "The passkey is 12345."; }),
            0);
}

}  // namespace
}  // namespace sbtrain
