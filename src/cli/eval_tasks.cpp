#include "cli/eval_tasks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <sstream>

#include "cli/range.h"
#include "core/error.h"
#include "core/files.h"
#include "serve/generate.h"

namespace sbtrain {
namespace {

using Json = nlohmann::ordered_json;

// A prompt of more tokens than this is refused: it is held in memory as text and as tokens.
constexpr int64_t kLongestPrompt = int64_t{1} << 24;
constexpr size_t kLargestHaystack = size_t{256} << 20;  // bytes
constexpr size_t kFewestWords = 40;                     // as many as the solved example of cwe has
constexpr int64_t kMostSlots = 64;                      // with the same bits (serve/decode_batch.h)
// What a prompt may take beyond the deadline for progress, on the CPU above all.
constexpr std::chrono::minutes kLongPrompt{30};

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const auto& entry : kNames<TextTaskKind>) names.emplace_back(entry.name);
  return names;
}

// The name of a task. CLI::IsMember would put all names into one word of the help and man page.
CLI::Validator task_name() {
  const auto check = [](const std::string& name) {
    const std::vector<std::string> names = task_names();
    if (std::ranges::find(names, name) != names.end()) return std::string();
    return fmt::format("no task '{}'; there are {}", name, fmt::join(names, ", "));
  };
  return {check, "TASK"};
}

TextTaskKind kind_of(const std::string& name) {
  const auto* const entry =
      std::ranges::find(kNames<TextTaskKind>, name, &EnumName<TextTaskKind>::name);
  require(entry != std::end(kNames<TextTaskKind>), "no task '{}'", name);
  return entry->value;
}

std::shared_ptr<const LocalText> read_haystack(const std::string& path) {
  if (path.empty()) return nullptr;
  return std::make_shared<LocalText>(read_input(path, ExitCode::kData, "", kLargestHaystack));
}

std::vector<std::string> read_words(const std::string& path) {
  if (path.empty()) return {};
  std::istringstream text(read_input(path, ExitCode::kData));
  std::set<std::string> words;
  for (std::string word; text >> word;) words.insert(word);
  if (words.size() < kFewestWords) {
    fail(ExitCode::kData, "{}: {} different words, cwe takes {} or more", path, words.size(),
         kFewestWords);
  }
  return {words.begin(), words.end()};
}

Json mean_json(const ScoreMean& mean) {
  return {{"samples", mean.samples}, {"score", mean.mean}, {"low", mean.low}, {"high", mean.high}};
}

Json depths_json(const std::vector<DepthScore>& depths) {
  Json json = Json::array();
  for (const DepthScore& depth : depths) {
    Json item = {{"from", depth.from}, {"to", depth.to}};
    item.update(mean_json(depth.score));
    json.push_back(std::move(item));
  }
  return json;
}

Json samples_json(const std::vector<SampleScore>& scores) {
  Json json = Json::array();
  for (const SampleScore& s : scores) {
    Json item = {{"score", s.score}, {"tokens", s.prompt}, {"generated", s.generated}};
    if (s.depth >= 0) {
      item["depth"] = s.depth;
      item["position"] = s.position;
    }
    json.push_back(std::move(item));
  }
  return json;
}

void print_head() {
  fmt::print("{:<24}{:>8}{:>9}{:>8}{:>18}{:>9}\n", "task", "length", "samples", "score",
             "95% interval", "tokens");
}

void print_score(const TextTask& task, int64_t length, const std::vector<SampleScore>& scores) {
  const ScoreMean mean = mean_score(scores);
  double tokens = 0;
  for (const SampleScore& s : scores) tokens += static_cast<double>(s.prompt);
  fmt::print("{:<24}{:>8}{:>9}{:>8.3f}{:>18}{:>9.0f}\n", name_of(task.kind()), length, mean.samples,
             mean.mean, fmt::format("{:.3f} .. {:.3f}", mean.low, mean.high),
             tokens / static_cast<double>(scores.size()));
  std::fflush(stdout);
}

// Scores over depth (rows) and length (columns), each with the number of samples.
void print_depths(const Json& task) {
  std::map<double, std::map<int64_t, std::string>> cells;
  std::map<double, std::string> names;
  std::vector<int64_t> lengths;
  for (const Json& result : task["lengths"]) {
    if (!result.contains("depths")) continue;
    lengths.push_back(result["length"]);
    for (const Json& depth : result["depths"]) {
      const double from = depth["from"], to = depth["to"];
      names[from] =
          from == to ? fmt::format("{:g}", from) : fmt::format("{:.1f} .. {:.1f}", from, to);
      cells[from][lengths.back()] =
          fmt::format("{:.2f} ({})", depth["score"].get<double>(), depth["samples"].get<int64_t>());
    }
  }
  if (lengths.empty()) return;
  fmt::print("  {:<14}", "depth");
  for (const int64_t length : lengths) fmt::print("{:>12}", length);
  for (auto& [from, row] : cells) {
    fmt::print("\n  {:<14}", names[from]);
    for (const int64_t length : lengths) fmt::print("{:>12}", row[length]);
  }
  fmt::print("\n");
}

}  // namespace

void TextTaskEvalOptions::add(CLI::App& command) {
  const char* group = "Tasks in plain text";
  CLI::Option* names =
      command
          .add_option("--tasks", tasks,
                      fmt::format("Let the model answer tasks at each of --lengths, which count "
                                  "prompt and answer: {}",
                                  fmt::join(task_names(), ", ")))
          ->delimiter(',')
          ->check(task_name())
          ->needs(command.get_option("--lengths"))
          ->group(group);
  for (const char* other : {"--data", "--tokens", "--sequence-length", "--recall",
                            "--tokens-per-length", "--same-targets", "--position-bin", "--window",
                            "--attention-maps", "--true-positions", "--task-positions"}) {
    names->excludes(command.get_option(other));
  }
  command.add_option("--samples", samples, "Prompts of each task and length")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str()
      ->needs(names)
      ->group(group);
  command
      .add_option("--slots", slots,
                  "Prompts that are continued together at most; fewer where the memory is short")
      ->check(CLI::Range(int64_t{1}, kMostSlots))
      ->capture_default_str()
      ->needs(names)
      ->group(group);
  command
      .add_option("--depths", depths,
                  "Where a single needle is hidden, such as 0,0.5,1: 0 is the beginning of the "
                  "filler, 1 its end. The samples take turns; without it each draws its depth")
      ->delimiter(',')
      ->check(in_range(0.0, 1.0))
      ->needs(names)
      ->group(group);
  command.add_option("--haystack", haystack, "Text in which needle_local_* hides its needles")
      ->needs(names)
      ->group(group);
  command
      .add_option("--word-list", word_list,
                  "Words for cwe, separated by white space; default: 1149 built-in ones")
      ->needs(names)
      ->group(group);
  command.add_option("--seed", seed, "Same seed, same samples")
      ->capture_default_str()
      ->needs(names)
      ->group(group);
}

void TextTaskEvalOptions::check(const std::vector<int64_t>& lengths) const {
  if (!asked()) return;
  const int64_t longest = *std::ranges::max_element(lengths);
  if (longest > kLongestPrompt) {
    fail(ExitCode::kUsage, "--lengths: {} tokens, --tasks takes up to {}", longest, kLongestPrompt);
  }
  const auto local = std::ranges::find_if(
      tasks, [](const std::string& name) { return needs_text(kind_of(name)); });
  if (local != tasks.end() && haystack.empty()) {
    fail(ExitCode::kUsage, "{} needs a text to hide its needles in: give it with --haystack",
         *local);
  }
  if (local == tasks.end() && !haystack.empty()) {
    fail(ExitCode::kUsage, "--haystack: none of --tasks is a needle_local_*");
  }
  if (!word_list.empty() && std::ranges::find(tasks, "cwe") == tasks.end()) {
    fail(ExitCode::kUsage, "--word-list: cwe is not one of --tasks");
  }
}

TextTaskEvaluation::TextTaskEvaluation(const TextTaskEvalOptions& options,
                                       const std::vector<int64_t>& lengths,
                                       const Tokenizer& tokenizer, const TrainingText& training)
    : options_(options), tokenizer_(tokenizer) {
  for (const int64_t length : lengths) lengths_.push_back({.tokens = length});
  const std::shared_ptr<const LocalText> text = read_haystack(options.haystack);
  const std::vector<std::string> words = read_words(options.word_list);
  for (const std::string& name : options.tasks) {
    const auto encode = [&tokenizer, training](const std::string& prompt) {
      return prompt_tokens(tokenizer, training, prompt);
    };
    tasks_.push_back(std::make_unique<TextTask>(TextTaskOptions{.kind = kind_of(name),
                                                                .seed = options.seed,
                                                                .depths = options.depths,
                                                                .text = text,
                                                                .words = words},
                                                encode));
  }
}

MemoryReport TextTaskEvaluation::plan(const ModelConfig& config, Backend backend, size_t room) {
  const auto of = [&](const Length& length) {
    // Capacity for a token and one more, although no prompt is as short.
    return plan_serving(config, backend, length.slots, std::max<int64_t>(length.tokens, 2));
  };
  MemoryReport largest;
  for (Length& length : lengths_) {
    length.slots = std::min(options_.slots, options_.samples);
    MemoryReport plan = of(length);
    while (length.slots > 1 && plan.total_bytes() > room) {
      length.slots = (length.slots + 1) / 2;
      plan = of(length);
    }
    if (plan.total_bytes() > largest.total_bytes()) largest = std::move(plan);
  }
  return largest;
}

std::vector<SampleScore> TextTaskEvaluation::answer(Control& ranks, InferenceModel& model,
                                                    const TextTask& task,
                                                    const Length& length) const {
  DecodeBatch batch(model.model(), model.params(), model.stream(), length.slots, length.tokens,
                    {.vocab = tokenizer_.size()});
  const auto continuation = [&](std::span<const TextSample> samples, int64_t max_tokens) {
    std::vector<std::vector<int32_t>> prompts;
    for (const TextSample& sample : samples) prompts.push_back(sample.prompt);
    const SamplingOptions greedy = {
        .max_tokens = max_tokens, .temperature = 0, .vocab = tokenizer_.size()};
    const auto say = [&](size_t i) {
      ranks.progress(fmt::format("prompt {} of {}", i, samples.size()), kLongPrompt);
    };
    std::vector<Continuation> answers;
    for (const std::vector<int32_t>& tokens :
         generate_all(batch, prompts, greedy, tokenizer_.eos(), say)) {
      answers.push_back({tokenizer_.decode(tokens), static_cast<int64_t>(tokens.size())});
    }
    return answers;
  };
  // All ranks form the same groups, however many of a group this one continues together.
  return score_samples(ranks, task, length.tokens, options_.samples, options_.slots, continuation);
}

Json TextTaskEvaluation::score(Control& ranks, InferenceModel& model, const TextTask& task,
                               const Length& length, bool table) const {
  if (const std::string problem = task.problem(length.tokens, options_.samples); !problem.empty()) {
    if (table)
      fmt::print("{:<24}{:>8}  absent: {}\n", name_of(task.kind()), length.tokens, problem);
    return {{"length", length.tokens}, {"absent", problem}};
  }
  const std::vector<SampleScore> scores = answer(ranks, model, task, length);
  if (table) print_score(task, length.tokens, scores);
  Json json = {{"length", length.tokens}};
  json.update(mean_json(mean_score(scores)));
  if (task.has_depth()) json["depths"] = depths_json(scores_by_depth(scores, options_.depths));
  json["results"] = samples_json(scores);
  return json;
}

Json TextTaskEvaluation::run(Control& ranks, InferenceModel& model, bool table,
                             const Progress& progress) const {
  Json results = {{"seed", options_.seed}, {"depths", options_.depths}, {"tasks", Json::array()}};
  if (table) print_head();
  for (const auto& task : tasks_) {
    results["tasks"].push_back({{"task", name_of(task->kind())},
                                {"tokens_to_generate", task->tokens_to_generate()},
                                {"lengths", Json::array()}});
    Json& result = results["tasks"].back();
    for (const Length& length : lengths_) {
      result["lengths"].push_back(score(ranks, model, *task, length, table));
      progress(results);
    }
    if (table) print_depths(result);
  }
  return results;
}

}  // namespace sbtrain
