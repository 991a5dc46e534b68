#include "cli/eval_tasks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "cli/eval_results.h"
#include "cli/options.h"
#include "serve/decode_batch.h"
#include "serve/generate.h"

namespace sbtrain {
namespace {

// What a prompt may take beyond the deadline for progress, on the CPU above all.
constexpr std::chrono::minutes kLongPrompt{30};

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

void TextTaskEvalOptions::add(Command command) {
  Option names = text_tasks.add(
      command, "Let the model answer tasks at each of --lengths, which count prompt and answer");
  names.needs(command.get_option("--lengths"));
  for (const char* other :
       {"--data", "--tokens", "--sequence-length", "--recall", "--tokens-per-length",
        "--same-targets", "--position-bin", "--bootstrap", "--reach", "--window",
        "--attention-maps", "--true-positions", "--task-positions"}) {
    names.excludes(command.get_option(other));
  }
  command
      .add_option("--slots", slots,
                  "Prompts that are continued together at most; fewer where the memory is short")
      .check(whole_numbers(int64_t{1}, kMostSlots))
      .capture_default_str()
      .needs(names)
      .group(kTextTaskGroup);
}

TextTaskEvaluation::TextTaskEvaluation(const TextTaskEvalOptions& options,
                                       const std::vector<int64_t>& lengths,
                                       const Tokenizer& tokenizer, const TrainingText& training,
                                       const KeyDropping& dropping)
    : options_(options),
      tokenizer_(tokenizer),
      dropping_(dropping),
      tasks_(make_text_tasks(options.text_tasks, [&tokenizer, training](const std::string& prompt) {
        return prompt_tokens(tokenizer, training, prompt);
      })) {
  for (const int64_t length : lengths) lengths_.push_back({.tokens = length});
}

MemoryReport TextTaskEvaluation::plan(const ModelConfig& config, Backend backend, size_t room) {
  const auto of = [&](const Length& length) {
    // Capacity for a token and one more, although no prompt is as short.
    return plan_serving(config, backend, length.slots, std::max<int64_t>(length.tokens, 2),
                        /*prompts_in_parts=*/false, dropping_);
  };
  MemoryReport largest;
  for (Length& length : lengths_) {
    length.slots = std::min(options_.slots, options_.text_tasks.samples);
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
                                                    const TextTask& task, const Length& length,
                                                    CacheUse& use) const {
  DecodeBatch batch(model.model(), model.params(), model.stream(), length.slots, length.tokens,
                    {.vocab = tokenizer_.size(), .dropping = dropping_});
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
    use = batch.cache_use();
    return answers;
  };
  // All ranks form the same groups, however many of a group this one continues together.
  return score_samples(ranks, task, length.tokens, options_.text_tasks.samples, options_.slots,
                       continuation);
}

Json TextTaskEvaluation::score(Control& ranks, InferenceModel& model, const TextTask& task,
                               const Length& length, bool table) const {
  if (const std::string problem = task.problem(length.tokens, options_.text_tasks.samples);
      !problem.empty()) {
    if (table)
      fmt::print("{:<24}{:>8}  absent: {}\n", name_of(task.kind()), length.tokens, problem);
    return {{"length", length.tokens}, {"absent", problem}};
  }
  CacheUse use;
  const std::vector<SampleScore> scores = answer(ranks, model, task, length, use);
  if (table) print_score(task, length.tokens, scores);
  Json json = {{"length", length.tokens}};
  if (use.seen > 0) {
    json["drop_below"] = dropping_.below;
    json["share_kept"] = use.share_kept();
  }
  json.update(mean_json(mean_score(scores)));
  if (task.has_depth())
    json["depths"] = depths_json(scores_by_depth(scores, options_.text_tasks.depths));
  json["results"] = samples_json(scores);
  return json;
}

Json TextTaskEvaluation::run(Control& ranks, InferenceModel& model, bool table,
                             const Progress& progress) const {
  Json results = {{"seed", options_.text_tasks.seed},
                  {"depths", options_.text_tasks.depths},
                  {"tasks", Json::array()}};
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

void evaluate_text_tasks(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const TrainingText training = training_text(run.checkpoint);
  // No text of a prompt is meant as a special token, also not in a haystack.
  const Tokenizer tokenizer(
      load_tokenizer(run.checkpoint, run.config, training, options.tokenizer).path());
  const double below = options.cache.asked() ? options.cache.drop_below.front() : 0;
  TextTaskEvaluation tasks(options.tasks, options.lengths, tokenizer, training,
                           options.cache.dropping(below));
  const MemoryReport plan = tasks.plan(run.config.model, run.backend, run.room());
  run.require_memory_for(plan);
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const auto write = [&](const Json& results) {
    Json json = run.header();
    json["train_length"] = run.config.train.sequence_length;
    json["rope_scaling"] = run.rope_scaling();
    json.update(results);
    write_json(options, json);
  };
  // A file has after each length what is known by then.
  const bool to_file = !options.json_file.empty();
  const Json results =
      tasks.run(run.ranks, model, run.shows() && !options.prints_json(), [&](const Json& known) {
        if (run.shows() && to_file) write(known);
      });
  if (run.shows() && options.prints_json()) write(results);
}

}  // namespace sbtrain
