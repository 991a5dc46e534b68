// sbtrain eval --attention-maps, --true-positions and --task-positions: files of attention maps,
// and the overlap of attention with the true positions of a task.
#include "cli/eval_attention.h"

#include <fmt/format.h>

#include <map>
#include <optional>

#include "cli/eval_results.h"
#include "cli/options.h"
#include "cli/run_tokenizer.h"
#include "core/error.h"
#include "core/files.h"
#include "eval/attention_overlap.h"
#include "eval/task_positions.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

constexpr int64_t kMaxMapTokens = 4096;

// The input of a model, and the positions that its queries should attend to.
struct AttentionExample {
  std::vector<int32_t> tokens;
  std::vector<TruePosition> positions;
};

void check_tokens(const std::vector<int32_t>& tokens, int64_t vocab, const std::string& where) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (count == 0 || count > kMaxMapTokens) {
    fail(ExitCode::kUsage, "{}: {} tokens, an attention map takes 1 to {}", where, count,
         kMaxMapTokens);
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab) {
      fail(ExitCode::kUsage, "{}: token {} is outside of the vocabulary of {}", where, token,
           vocab);
    }
  }
}

const std::string& module_of(const ModelConfig& config, int64_t layer) {
  return config.attention[static_cast<size_t>(layer) % config.attention.size()].type;
}

// {"examples": [{"tokens": [ids], "positions": [[query, key], ...]}, ...]}
std::vector<AttentionExample> read_examples(const std::string& path) {
  const std::string text = read_input(path, ExitCode::kData);
  try {
    std::vector<AttentionExample> examples;
    const Json json = Json::parse(text);
    for (const Json& item : json.at("examples")) {
      AttentionExample example{.tokens = item.at("tokens").get<std::vector<int32_t>>(),
                               .positions = {}};
      for (const auto& [query, key] :
           item.at("positions").get<std::vector<std::pair<int64_t, int64_t>>>()) {
        example.positions.push_back({query, key});
      }
      examples.push_back(std::move(example));
    }
    return examples;
  } catch (const Json::exception& error) {
    fail(ExitCode::kData,
         "{}: {}; expected {{\"examples\": [{{\"tokens\": [ids], \"positions\": [[query, key], "
         "...]}}, ...]}}",
         path, error.what());
  }
}

AttentionExample task_example(const Task& task, int64_t index, const char* option) {
  if (index >= task.config().eval_examples) {
    fail(ExitCode::kUsage, "{}: the task has {} held-out examples", option,
         task.config().eval_examples);
  }
  PackedBatch batch;
  clear(batch, task.length());
  task.append_example(batch, Task::Split::kHeldOut, index);
  return {.tokens = batch.tokens, .positions = answer_positions(batch)};
}

// Writes `maps.json` and a file for each head: f32 [T, T], whose row j holds the weights with which
// token j attends, and after it the remainder f32 [T] if there is one. Returns the content of
// maps.json. `tokenizer_path` is a file, or empty for token ids; it must be that of the training
// data, `training`, like which a text begins. `task` is null, or the task of --task-example. Throws
// ExitCode::kUsage for no tokens, more than kMaxMapTokens, or a token outside of the vocabulary.
Json dump_attention_maps(InferenceModel& model, const AttentionEvalOptions& options,
                         const std::string& tokenizer_path, const TrainingText& training,
                         const Task* task) {
  const ModelConfig& config = model.model().config();
  std::vector<int32_t> tokens = options.token_ids;
  std::vector<TruePosition> positions;
  std::optional<Tokenizer> tokenizer;
  if (!tokenizer_path.empty()) {
    tokenizer.emplace(tokenizer_path);
    check_tokenizer(*tokenizer, training);
    check_vocabulary(*tokenizer, config.vocab);
  }
  if (!options.text.empty()) {
    if (!tokenizer) fail(ExitCode::kUsage, "--text needs a tokenizer; give it with --tokenizer");
    tokens = prompt_tokens(*tokenizer, training, options.text);
  }
  if (task) {
    AttentionExample example = task_example(*task, options.task_example, "--task-example");
    tokens = std::move(example.tokens);
    positions = std::move(example.positions);
  }
  if (tokens.empty()) {
    fail(ExitCode::kUsage,
         "--attention-maps: 0 tokens to look at; give some with --text or --token-ids");
  }
  check_tokens(tokens, config.vocab,
               task                   ? "--task-example"
               : options.text.empty() ? "--token-ids"
                                      : "--text");

  Json header = {{"tokens", tokens}};
  for (const auto& [query, key] : positions) header["positions"].push_back({query, key});
  for (const int32_t token : tokens) {
    if (tokenizer && token < tokenizer->size()) {
      header["texts"].push_back(std::string(tokenizer->bytes(token)));
    }
  }
  header["layers"] = config.layers;
  header["heads"] = config.heads;
  header["maps"] = Json::array();
  const auto folder = std::filesystem::path(options.maps);
  model.attention_maps(tokens, [&](int64_t layer, int64_t head, const AttentionMap& map) {
    const std::string name = fmt::format("layer-{:02}-head-{:02}.f32", layer, head);
    const auto write = [](AtomicFile& file, const std::vector<float>& values) {
      file.write(values.data(), values.size() * sizeof(float));
    };
    AtomicFile file(folder / name);
    write(file, map.weights_TT);
    write(file, map.remainder_T);
    file.commit();
    header["maps"].push_back({{"layer", layer},
                              {"head", head},
                              {"module", module_of(config, layer)},
                              {"file", name},
                              {"remainder", !map.remainder_T.empty()}});
  });
  if (header["maps"].empty()) {
    fail(ExitCode::kUsage, "--attention-maps: no layer of the model weighs keys");
  }
  // A token may end inside a UTF-8 character.
  const std::string text = header.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  replace_file(folder / "maps.json", text);
  return header;
}

// Measures the overlap of every head's attention with the examples of --true-positions, or with
// those of `task` if --task-positions is given.
Json measure_overlap(InferenceModel& model, const AttentionEvalOptions& options, const Task* task) {
  const ModelConfig& config = model.model().config();
  const std::string where = task ? "--task-positions" : options.true_positions;
  std::vector<AttentionExample> examples;
  if (!task) examples = read_examples(where);
  for (int64_t i = 0; task && i < options.task_positions; ++i) {
    examples.push_back(task_example(*task, i, "--task-positions"));
  }
  std::map<std::pair<int64_t, int64_t>, AttentionOverlap> heads;
  for (const AttentionExample& example : examples) {
    check_tokens(example.tokens, config.vocab, where);
    model.attention_maps(example.tokens, [&](int64_t layer, int64_t head, const AttentionMap& map) {
      heads.try_emplace({layer, head}, options.threshold).first->second.add(map, example.positions);
    });
  }
  Json rows = Json::array();
  for (const auto& [place, overlap] : heads) {
    rows.push_back({{"layer", place.first},
                    {"head", place.second},
                    {"module", module_of(config, place.first)},
                    {"queries", overlap.queries()},
                    {"iou_top", overlap.top()},
                    {"iou_threshold", overlap.threshold()},
                    {"iou_soft", overlap.soft()},
                    {"mass", overlap.mass()}});
  }
  return {{"examples", examples.size()}, {"threshold", options.threshold}, {"heads", rows}};
}

}  // namespace

void AttentionEvalOptions::add(Command command) {
  const char* group = "Attention";
  Option folder =
      command
          .add_option("--attention-maps", maps,
                      "Write every head's attention map of --text or --token-ids to this folder")
          .group(group);
  Option words = command.add_option("--text", text, "Text to look at").group(group);
  Option ids = command.add_option("--token-ids", token_ids, "Or tokens, such as 17,4,99")
                   .delimiter(',')
                   .group(group);
  Option of_task =
      command
          .add_option("--task-example", task_example,
                      "Or a held-out example, by its index from 0, of the task that the model was "
                      "trained on")
          .check(non_negative())
          .group(group);
  words.needs(folder).excludes(ids).excludes(of_task);
  ids.needs(folder).excludes(of_task);
  of_task.needs(folder);
  Option positions =
      command
          .add_option("--true-positions", true_positions,
                      "Overlap of every head's attention with the true positions in this JSON file")
          .excludes(folder)
          .group(group);
  Option answers =
      command
          .add_option("--task-positions", task_positions,
                      "The same for this number of held-out examples of the task that the model "
                      "was trained on, whose true positions are the answers")
          .check(positive())
          .excludes(folder)
          .excludes(positions)
          .group(group);
  for (Option own : {folder, positions, answers}) {
    for (const char* loss :
         {"--data", "--tokens", "--recall", "--lengths", "--benefit", "--window"}) {
      own.excludes(command.get_option(loss));
    }
  }
  threshold_option =
      command.add_option("--threshold", threshold, "Weights above it count as attended")
          .check(in_range(0.0, 1.0))
          .capture_default_str()
          .group(group);
}

void AttentionEvalOptions::check() const {
  if (threshold_option.given() && true_positions.empty() && task_positions == 0) {
    fail(ExitCode::kUsage, "--threshold requires --true-positions or --task-positions");
  }
}

void evaluate_attention(const Evaluation& run) {
  const EvalOptions& options = run.options;
  std::optional<Task> task;
  if (options.attention.of_task()) {
    if (!run.config.data.task.active()) {
      fail(ExitCode::kUsage, "--{}: the model was not trained on a task (data.task)",
           options.attention.task_positions > 0 ? "task-positions" : "task-example");
    }
    task.emplace(run.task());
  }
  const Task* examples = task ? &*task : nullptr;
  // Maps are limited to few tokens, so that the weights are what counts.
  InferenceModel model(run.config.model, run.checkpoint, run.backend, run.plan(1));
  if (!options.attention.maps.empty()) {
    const std::string tokenizer = task ? "" : run.tokenizer();
    const Json maps = dump_attention_maps(model, options.attention, tokenizer,
                                          training_text(run.checkpoint), examples);
    fmt::print("{} maps of {} tokens in {}\n", maps["maps"].size(), maps["tokens"].size(),
               options.attention.maps);
    return;
  }
  const Json overlap = measure_overlap(model, options.attention, examples);
  if (options.json.given()) {
    Json json = run.header();
    if (task) {
      json["task"] = name_of(task->config().type);
      json["pairs"] = task->config().pairs;
      json["sequence_length"] = task->length();
    }
    json.update(overlap);
    write_json(options, json);
    if (options.prints_json()) return;
  }
  fmt::print("{:>6}{:>6}{:>9}{:>10}{:>15}{:>10}{:>8}\n", "layer", "head", "queries", "IoU top",
             "IoU threshold", "IoU soft", "mass");
  for (const Json& row : overlap["heads"]) {
    fmt::print("{:>6}{:>6}{:>9}{:>10.3f}{:>15.3f}{:>10.3f}{:>8.3f}\n", row["layer"].get<int64_t>(),
               row["head"].get<int64_t>(), row["queries"].get<int64_t>(),
               row["iou_top"].get<double>(), row["iou_threshold"].get<double>(),
               row["iou_soft"].get<double>(), row["mass"].get<double>());
  }
}

}  // namespace sbtrain
