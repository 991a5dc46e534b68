// sbtrain eval: loss and perplexity of a checkpoint on document stores, by rows, by length of the
// context or in sliding windows; answers to tasks in plain text; and the weights of its attention.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/cli.h"
#include "cli/eval_attention.h"
#include "cli/eval_tasks.h"
#include "cli/ranks.h"
#include "cli/rope_options.h"
#include "cli/run_tokenizer.h"
#include "config/stored_config.h"
#include "core/device.h"
#include "core/files.h"
#include "eval/bootstrap.h"
#include "eval/perplexity.h"
#include "eval/rank_sums.h"
#include "eval/reach.h"
#include "eval/recall.h"
#include "eval/task_accuracy.h"
#include "eval/windows.h"
#include "serve/inference.h"
#include "train/bits.h"
#include "train/host_share.h"
#include "train/progress.h"

namespace sbtrain {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kAllTokens = int64_t{1} << 60;
constexpr int64_t kMostTokens = int64_t{1} << 30;  // at once; positions have 32 bits
constexpr int64_t kMaxExactPositions = 4096;       // longer windows report losses by bin only
constexpr int64_t kShortestContext = 64;           // of --benefit

struct EvalOptions {
  std::string checkpoint;
  std::vector<std::string> data;
  std::string tokenizer;
  DeviceChoice device = DeviceChoice::kAuto;
  int gpus = 0;  // 0: all
  int64_t tokens = 0;
  int64_t sequence_length = 0;
  bool recall = false;
  std::vector<int64_t> lengths;
  int64_t tokens_per_length = int64_t{1} << 19;
  int64_t same_targets = 0;
  int64_t position_bin = 128;
  bool reach = false;
  int64_t benefit = 0;  // tokens of the full context
  int64_t benefit_targets = 256;
  int64_t bootstrap = 1000;
  int64_t window = 0;
  int64_t stride = 0;
  AttentionEvalOptions attention;
  TextTaskEvalOptions tasks;
  RopeOptions rope;
  bool ema = false;
  Option tokens_per_length_option{};  // tell whether these were given
  Option bootstrap_option{};
  Option json{};          // tells whether --json was given
  std::string json_file;  // empty: print the object
  // Standard output has room for one object, or for a table.
  bool prints_json() const { return json.given() && json_file.empty(); }
  void check() const;  // throws ExitCode::kUsage for options that nothing would read
};

void EvalOptions::check() const {
  const bool windows = !lengths.empty() || benefit > 0;
  if (tokens_per_length_option.given() && !windows) {
    fail(ExitCode::kUsage, "--tokens-per-length requires --lengths or --benefit");
  }
  if (bootstrap_option.given() && ((!windows && window == 0) || reach)) {
    fail(ExitCode::kUsage, "--bootstrap requires losses by --lengths, --benefit or --window");
  }
}

// The checkpoint that rank 0 finds: the newest one may change while a job saves.
CheckpointReader open_for_all(Control& ranks, const std::string& path) {
  std::optional<CheckpointReader> mine;
  if (ranks.rank() == 0) mine.emplace(open_checkpoint(path));
  const std::vector<std::string> folders = ranks.exchange(
      "checkpoint to evaluate", all_ranks(ranks.world()), mine ? mine->folder().string() : "");
  return mine ? std::move(*mine) : open_checkpoint(folders.front());
}

// The model, data and options of an evaluation, shared by all kinds.
struct Evaluation {
  Evaluation(const EvalOptions& options, const Job& job)
      : options(options),
        ranks(*job.control),
        node(job.launch.node),
        local_world(job.launch.local_world),
        // Where one rank measures attention, the others have ended.
        checkpoint(options.attention.asked() ? open_checkpoint(options.checkpoint)
                                             : open_for_all(ranks, options.checkpoint)),
        config(stored_config(checkpoint)),
        backend(select_rank_backend(options.device, job.launch)) {
    if (options.ema) checkpoint.use_average();
    options.rope.apply(config);
    if (!options.json_file.empty()) check_output(options.json_file, inputs());
  }

  // Every file that an evaluation may read.
  std::vector<std::string> inputs() const {
    std::vector<std::string> files = options.data.empty() ? config.data.validation : options.data;
    const TextTaskSelection& tasks = options.tasks.text_tasks;
    files.insert(files.end(),
                 {tokenizer(), options.attention.true_positions, tasks.haystack, tasks.word_list});
    std::error_code gone;  // a job that saves may have removed the checkpoint
    for (const auto& file : std::filesystem::directory_iterator(checkpoint.folder(), gone)) {
      files.push_back(file.path().string());
    }
    return files;
  }
  std::string tokenizer() const { return run_tokenizer(checkpoint, config, options.tokenizer); }
  HeldOutOptions held_out(int64_t length) const {
    return {.paths = options.data.empty() ? config.data.validation : options.data,
            .tokenizer = tokenizer(),
            .tokenizer_hash = training_text(checkpoint).tokenizer_hash,
            .vocab = config.model.vocab,
            .sequence_length = length,
            .micro_batch = std::max<int64_t>(1, tokens_at_once() / length),
            .max_tokens = options.tokens > 0 ? options.tokens : kAllTokens,
            .predict_across_documents = config.data.predict_across_documents};
  }
  int64_t sequence_length() const {
    return options.sequence_length > 0 ? options.sequence_length : config.train.sequence_length;
  }
  Task task() const {
    return {config.data.task, config.model.vocab, sequence_length(), config.seed};
  }
  // The memory for rows of `length` tokens. Refuses a length for which the device has too little,
  // so it is called before anything is read.
  MemoryReport plan(int64_t length) const {
    MemoryReport plan =
        plan_evaluation(config.model, backend, std::max(tokens_at_once(), length), length);
    require_memory_for(plan);
    return plan;
  }
  // Refuses what the device has too little memory for, or the ranks of a machine together.
  void require_memory_for(const MemoryReport& plan) const {
    require_room(backend, plan);
    if (backend == Backend::kCpu && !options.attention.asked()) {
      require_shared_memory(ranks, node, plan.total_bytes(), "the evaluation");
    }
  }
  // The bytes of its device that this rank may take.
  size_t room() const {
    const size_t free = device_memory(backend).free;
    return backend == Backend::kCpu ? free / static_cast<size_t>(local_world) : free;
  }
  // As many tokens as one micro-batch of the training run.
  int64_t tokens_at_once() const { return config.train.micro_batch * config.train.sequence_length; }
  Json header() const {
    Json json = {{"checkpoint", options.checkpoint},
                 {"name", config.name},
                 {"step", checkpoint.manifest().step}};
    if (options.ema) json["ema"] = true;
    return json;
  }
  // Which weights are evaluated.
  std::string step() const {
    return fmt::format("step {}{}", checkpoint.manifest().step,
                       options.ema ? ", average of the weights" : "");
  }
  // Whether this rank is the one that shows the results.
  bool shows() const { return ranks.rank() == 0; }
  std::string_view rope_scaling() const { return options.rope.name(); }

  const EvalOptions& options;
  Control& ranks;
  int node;  // of this rank
  int local_world;
  CheckpointReader checkpoint;
  Config config;
  Backend backend;
};

[[noreturn]] void fail_without_data() {
  fail(ExitCode::kUsage, "the run's configuration names no validation data; give it with --data");
}

// ---- Results ------------------------------------------------------------------------------------

void write_json(const EvalOptions& options, const Json& json) {
  if (options.json_file.empty()) {
    fmt::print("{}\n", json.dump());
    return;
  }
  replace_file(options.json_file, json.dump(1) + "\n");
}

// Adds the known values of `result` to `json`.
void add_result(Json& json, const Perplexity& result) {
  json["tokens"] = result.tokens;
  json["loss"] = result.loss();
  json["perplexity"] = perplexity(result.loss());
  if (result.bytes > 0) {
    json["bits_per_byte"] = bits_per_byte(result.loss(), result.tokens, result.bytes);
  }
}

Json recall_json(const Recall& recall) {
  const auto split = [](const RecallSplit& parts) {
    Json json;
    add_result(json["ar"], parts.recalled);
    add_result(json["non_ar"], parts.other);
    return json;
  };
  return {{"token", split(recall.token)}, {"bigram", split(recall.bigram)}};
}

void print_recall(const Recall& recall) {
  const auto line = [](const char* name, const Perplexity& part) {
    fmt::print("  {:<14} {:.4f} nats per token, perplexity {:.2f}, {} tokens\n", name, part.loss(),
               perplexity(part.loss()), part.tokens);
  };
  line("AR token", recall.token.recalled);
  line("non-AR token", recall.token.other);
  line("AR bigram", recall.bigram.recalled);
  line("non-AR bigram", recall.bigram.other);
}

void print_result(const std::string& title, const Perplexity& result) {
  fmt::print("{}\n", title);
  fmt::print("  loss           {:.4f} nats per token\n", result.loss());
  fmt::print("  perplexity     {:.2f}\n", perplexity(result.loss()));
  if (result.bytes > 0) {
    fmt::print("  bits per byte  {:.4f}\n",
               bits_per_byte(result.loss(), result.tokens, result.bytes));
  }
}

// ---- Rows of the data ---------------------------------------------------------------------------

struct RowScores {
  Perplexity total;
  Recall recall;
  void visit(const auto& f) {
    total.visit(f);
    recall.visit(f);
  }
};

RowScores score_rows(const Evaluation& run, const HeldOut& held_out, InferenceModel& model,
                     int64_t length) {
  const auto of_batch = [&](int64_t i) {
    const PackedBatch batch = held_out.batch(i);
    RowScores scores{.total = {.tokens = batch.valid_targets, .bytes = held_out.bytes(batch)},
                     .recall = {}};
    if (!run.options.recall) {
      scores.total.loss_sum = model.score(batch, length).loss_sum;
      return scores;
    }
    const std::vector<float> losses = model.losses(batch, length);
    scores.recall.add(batch, losses);
    scores.total.loss_sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    return scores;
  };
  return sum_over_ranks<RowScores>(run.ranks, held_out.batches(), {}, of_batch);
}

void evaluate_rows(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const int64_t length = run.sequence_length();
  const MemoryReport plan = run.plan(length);
  const HeldOut held_out(run.held_out(length));
  if (held_out.empty()) fail_without_data();
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const auto start = std::chrono::steady_clock::now();
  const auto [result, recall] = score_rows(run, held_out, model, length);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!run.shows()) return;
  if (options.json.given()) {
    Json json = run.header();
    json["sequence_length"] = length;
    add_result(json, result);
    if (options.recall) json["recall"] = recall_json(recall);
    write_json(options, json);
    if (options.prints_json()) return;
  }
  print_result(fmt::format("{}, {} tokens predicted in sequences of {}, {:.1f} s", run.step(),
                           result.tokens, length, seconds),
               result);
  if (options.recall) print_recall(recall);
}

// ---- Windows ------------------------------------------------------------------------------------

// null where a position has no target.
Json means(const WindowScores& scores, int64_t bin) {
  Json json = Json::array();
  for (const double mean : binned_losses(scores, bin)) {
    json.push_back(std::isnan(mean) ? Json() : Json(mean));
  }
  return json;
}

// "interval": [low, high], or null without one.
Json interval_json(const std::optional<Interval>& interval) {
  return interval ? Json{interval->low, interval->high} : Json();
}

std::string interval_text(const std::optional<Interval>& interval) {
  return interval ? fmt::format("{:.4f} .. {:.4f}", interval->low, interval->high) : "";
}

// The sums of each document, by which results of several models on the same targets are compared.
Json by_document_json(const WindowScores& scores) {
  Json json = {{"store", Json::array()},
               {"document", Json::array()},
               {"tokens", Json::array()},
               {"loss_sum", Json::array()}};
  for (const DocumentScore& document : scores.by_document) {
    json["store"].push_back(document.store);
    json["document"].push_back(document.document);
    json["tokens"].push_back(document.tokens);
    json["loss_sum"].push_back(document.loss_sum);
  }
  return json;
}

void add_documents(Json& json, const EvalOptions& options, const WindowScores& scores) {
  json["loss_interval"] = interval_json(loss_interval(scores.by_document, options.bootstrap));
  json["by_document"] = by_document_json(scores);
}

Json length_json(const EvalOptions& options, int64_t length, const WindowScores& scores) {
  Json json = {{"length", length}, {"windows", scores.windows}, {"documents", scores.documents}};
  add_result(json, scores.total);
  if (options.recall) json["recall"] = recall_json(scores.recall);
  json["position_bin"] = options.position_bin;
  json["loss_by_position"] = means(scores, options.position_bin);
  if (length <= kMaxExactPositions) json["loss_at_position"] = means(scores, 1);
  add_documents(json, options, scores);
  return json;
}

void evaluate_lengths(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const int64_t shortest = *std::min_element(options.lengths.begin(), options.lengths.end());
  if (options.same_targets > shortest) {
    fail(ExitCode::kUsage, "--same-targets: {} targets do not fit the shortest length, {}",
         options.same_targets, shortest);
  }
  const MemoryReport plan =
      run.plan(*std::max_element(options.lengths.begin(), options.lengths.end()));
  const WindowReader reader(run.held_out(1));
  if (reader.empty()) fail_without_data();
  const int64_t longest_document = reader.longest_document();
  int64_t longest = 0;  // the longest length that some document reaches
  for (const int64_t length : options.lengths) {
    if (length <= longest_document) longest = std::max(longest, length);
  }
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const TokenLosses losses = [&](const PackedBatch& batch, int64_t max_seqlen) {
    return model.losses(batch, max_seqlen);
  };

  const bool table = run.shows() && !options.prints_json();
  Json results = Json::array();
  if (table) {
    fmt::print("{:>8}{:>9}{:>11}{:>10}{:>9}{:>12}{:>20}\n", "length", "windows", "documents",
               "tokens", "loss", "perplexity", "loss, 95%");
  }
  for (const int64_t length : options.lengths) {
    if (length > longest_document) {
      const std::string reason =
          fmt::format("no document has {} tokens; the longest has {}", length, longest_document);
      results.push_back({{"length", length}, {"absent", reason}});
      if (table) fmt::print("{:>8}  absent: {}\n", length, reason);
      continue;
    }
    std::vector<Window> windows =
        reader.of_length(options.same_targets > 0 ? longest : length, options.tokens_per_length);
    if (options.same_targets > 0) {
      windows = WindowReader::last_tokens(std::move(windows), length, options.same_targets);
    }
    const WindowScores scores =
        reader.score(run.ranks, windows, run.tokens_at_once(), length, losses);
    results.push_back(length_json(options, length, scores));
    if (!table) continue;
    fmt::print("{:>8}{:>9}{:>11}{:>10}{:>9.4f}{:>12.2f}{:>20}\n", length, scores.windows,
               scores.documents, scores.total.tokens, scores.total.loss(),
               perplexity(scores.total.loss()),
               interval_text(loss_interval(scores.by_document, options.bootstrap)));
    if (options.recall) print_recall(scores.recall);
    std::fflush(stdout);
  }
  if (!run.shows() || !options.json.given()) return;
  Json json = run.header();
  json["train_length"] = run.config.train.sequence_length;
  json["rope_scaling"] = run.rope_scaling();
  json["tokens_per_length"] = options.tokens_per_length;
  json["same_targets"] = options.same_targets;
  json["data"] = reader.content_hashes();
  json["lengths"] = std::move(results);
  write_json(options, json);
}

void evaluate_sliding(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const int64_t stride = options.stride > 0 ? options.stride : (options.window + 1) / 2;
  if (stride > options.window) {
    fail(ExitCode::kUsage, "--stride: {} is more than the window of {}", stride, options.window);
  }
  const MemoryReport plan = run.plan(options.window);
  const HeldOutOptions held_out = run.held_out(1);
  const WindowReader reader(held_out);
  if (reader.empty()) fail_without_data();
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const WindowScores scores = reader.score(
      run.ranks, reader.sliding(options.window, stride, held_out.max_tokens), run.tokens_at_once(),
      options.window, [&](const PackedBatch& batch, int64_t max_seqlen) {
        return model.losses(batch, max_seqlen);
      });
  if (!run.shows()) return;
  if (options.json.given()) {
    Json json = run.header();
    json["rope_scaling"] = run.rope_scaling();
    json["window"] = options.window;
    json["stride"] = stride;
    json["data"] = reader.content_hashes();
    json["windows"] = scores.windows;
    json["documents"] = scores.documents;
    add_result(json, scores.total);
    add_documents(json, options, scores);
    if (options.recall) json["recall"] = recall_json(scores.recall);
    write_json(options, json);
    if (options.prints_json()) return;
  }
  print_result(
      fmt::format("{}, {} tokens of {} documents predicted in windows of {}, one "
                  "every {}",
                  run.step(), scores.total.tokens, scores.documents, options.window, stride),
      scores.total);
  if (options.recall) print_recall(scores.recall);
}

// ---- What the context is worth ------------------------------------------------------------------

// The contexts of --benefit: 64, 128, ... below the full one, which is the last.
std::vector<int64_t> contexts_up_to(int64_t full) {
  std::vector<int64_t> contexts;
  for (int64_t context = kShortestContext; context < full; context *= 2) {
    contexts.push_back(context);
  }
  contexts.push_back(full);
  return contexts;
}

Json benefit_json(const Evaluation& run, const WindowReader& reader,
                  const std::vector<int64_t>& contexts, const std::vector<WindowScores>& scores) {
  const EvalOptions& options = run.options;
  const WindowScores& full = scores.back();
  Json json = run.header();
  json["train_length"] = run.config.train.sequence_length;
  json["rope_scaling"] = run.rope_scaling();
  json["tokens_per_length"] = options.tokens_per_length;
  json["full_context"] = contexts.back();
  json["targets"] = options.benefit_targets;
  json["data"] = reader.content_hashes();
  json["documents"] = full.documents;
  json["benefit"] = Json::array();
  for (size_t i = 0; i < contexts.size(); ++i) {
    Json row = {{"context", contexts[i]}};
    add_result(row, scores[i].total);
    row["difference"] = full.total.loss() - scores[i].total.loss();
    row["difference_interval"] = interval_json(
        difference_interval(full.by_document, scores[i].by_document, options.bootstrap));
    add_documents(row, options, scores[i]);
    json["benefit"].push_back(std::move(row));
  }
  return json;
}

// loss(full context) - loss(last d tokens), on the same targets: below zero where what lies farther
// back than d tokens helps.
void evaluate_benefit(const Evaluation& run) {
  const EvalOptions& options = run.options;
  if (options.benefit_targets > options.benefit) {
    fail(ExitCode::kUsage, "--benefit-targets: {} targets do not fit a context of {} tokens",
         options.benefit_targets, options.benefit);
  }
  const MemoryReport plan = run.plan(options.benefit);
  const WindowReader reader(run.held_out(1));
  if (reader.empty()) fail_without_data();
  if (options.benefit > reader.longest_document()) {
    fail(ExitCode::kUsage, "--benefit: no document has {} tokens; the longest has {}",
         options.benefit, reader.longest_document());
  }
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const std::vector<Window> windows = reader.of_length(options.benefit, options.tokens_per_length);
  const std::vector<int64_t> contexts = contexts_up_to(options.benefit);
  std::vector<WindowScores> scores;
  for (const int64_t context : contexts) {
    scores.push_back(reader.score(
        run.ranks, WindowReader::last_targets(windows, options.benefit_targets, context),
        run.tokens_at_once(), context, [&](const PackedBatch& batch, int64_t max_seqlen) {
          return model.losses(batch, max_seqlen);
        }));
  }
  if (!run.shows()) return;
  const WindowScores& full = scores.back();
  if (options.json.given()) {
    write_json(options, benefit_json(run, reader, contexts, scores));
    if (options.prints_json()) return;
  }
  fmt::print("{} targets in {} windows of {} tokens of {} documents\n", full.total.tokens,
             windows.size(), options.benefit, full.documents);
  fmt::print("{:>8}{:>9}{:>22}{:>22}\n", "context", "loss", "full minus this one", "95%");
  for (size_t i = 0; i < contexts.size(); ++i) {
    fmt::print("{:>8}{:>9.4f}{:>22.4f}{:>22}\n", contexts[i], scores[i].total.loss(),
               full.total.loss() - scores[i].total.loss(),
               interval_text(difference_interval(full.by_document, scores[i].by_document,
                                                 options.bootstrap)));
  }
}

// ---- How far heads reach ------------------------------------------------------------------------

Json share_json(const KeysRead& keys) {
  return keys.visible > 0 ? Json(share_read(keys)) : Json();
}

Json reach_json(const ModelConfig& model, const HeadReach& reach) {
  Json layers = Json::array();
  for (size_t l = 0; l < reach.size(); ++l) {
    Json heads = Json::array();
    for (const KeysRead& head : reach[l]) heads.push_back(share_json(head));
    layers.push_back({{"layer", l},
                      {"module", model.attention[l % model.attention.size()].type},
                      {"keys_read", share_json(all_of(reach[l]))},
                      {"heads", std::move(heads)}});
  }
  return layers;
}

// A module that never skips a key has a dash.
void print_reach(const HeadReach& reach) {
  const auto percent = [](const KeysRead& keys) {
    return keys.visible > 0 ? fmt::format("{:.1f}%", 100 * share_read(keys)) : std::string("-");
  };
  fmt::print("{:>8}{:>8}", "layer", "all");
  for (size_t h = 0; h < reach.front().size(); ++h) fmt::print("{:>8}", fmt::format("h{}", h));
  fmt::print("\n");
  for (size_t l = 0; l < reach.size(); ++l) {
    fmt::print("{:>8}{:>8}", l, percent(all_of(reach[l])));
    for (const KeysRead& head : reach[l]) fmt::print("{:>8}", percent(head));
    fmt::print("\n");
  }
}

void evaluate_reach(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const MemoryReport plan =
      run.plan(*std::max_element(options.lengths.begin(), options.lengths.end()));
  const WindowReader reader(run.held_out(1));
  if (reader.empty()) fail_without_data();
  const ModelConfig& config = run.config.model;
  InferenceModel model(config, run.checkpoint, run.backend, plan);
  Json results = Json::array();
  for (const int64_t length : options.lengths) {
    if (length > reader.longest_document()) {
      fail(ExitCode::kUsage, "--lengths: no document has {} tokens; the longest has {}", length,
           reader.longest_document());
    }
    const std::vector<Window> windows = reader.of_length(length, options.tokens_per_length);
    const HeadReach reach =
        measure_reach(run.ranks, reader, windows, length, config.layers, config.heads,
                      [&](const PackedBatch& batch, int64_t max_seqlen) {
                        return model.keys_read_by_head(batch, max_seqlen);
                      });
    const KeysRead all = all_of(reach);
    if (all.visible == 0) {
      fail(ExitCode::kUsage,
           "--reach: the model has no attention that skips keys: none has the option skip_epsilon");
    }
    results.push_back({{"length", length},
                       {"windows", windows.size()},
                       {"keys_read", share_json(all)},
                       {"layers", reach_json(config, reach)}});
    if (!run.shows() || options.prints_json()) continue;
    fmt::print("{} windows of {} tokens, {:.1f}% of their keys are read\n", windows.size(), length,
               100 * share_read(all));
    print_reach(reach);
    std::fflush(stdout);
  }
  if (!run.shows() || !options.json.given()) return;
  Json json = run.header();
  json["train_length"] = run.config.train.sequence_length;
  json["reach"] = std::move(results);
  write_json(options, json);
}

// ---- Attention ----------------------------------------------------------------------------------

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

// ---- Tasks --------------------------------------------------------------------------------------

void evaluate_task(const Evaluation& run) {
  const EvalOptions& options = run.options;
  if (options.tokens > 0 || options.recall) {
    fail(ExitCode::kUsage, "--{}: without --data all held-out examples of the run's task are used",
         options.tokens > 0 ? "tokens" : "recall");
  }
  const Task task = run.task();
  const int64_t length = task.length();
  InferenceModel model(run.config.model, run.checkpoint, run.backend, run.plan(length));
  const TaskAccuracy result =
      task_accuracy(run.ranks, task, std::max<int64_t>(1, run.tokens_at_once() / length),
                    [&](const PackedBatch& batch) { return model.score(batch, length); });
  if (!run.shows()) return;
  if (options.json.given()) {
    Json json = run.header();
    json["sequence_length"] = length;
    json["task"] = name_of(task.config().type);
    json["pairs"] = task.config().pairs;
    json["labels"] = result.labels;
    json["loss"] = result.loss();
    json["accuracy"] = result.accuracy();
    write_json(options, json);
    if (options.prints_json()) return;
  }
  fmt::print("{}, {} labels of {} held-out examples of {} with {} pairs in {} tokens\n", run.step(),
             result.labels, task.config().eval_examples, name_of(task.config().type),
             task.config().pairs, length);
  fmt::print("  loss           {:.4f} nats per label\n", result.loss());
  fmt::print("  accuracy       {:.4f}\n", result.accuracy());
}

void evaluate_text_tasks(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const TrainingText training = training_text(run.checkpoint);
  // No text of a prompt is meant as a special token, also not in a haystack.
  const Tokenizer tokenizer(
      load_tokenizer(run.checkpoint, run.config, training, options.tokenizer).path());
  TextTaskEvaluation tasks(options.tasks, options.lengths, tokenizer, training);
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

// Loading takes long for a large model.
constexpr std::chrono::minutes kLoading{60};

ExitCode evaluate_as(const EvalOptions& options, const Job& job) {
  job.control->progress("loading", kLoading);
  // One GPU measures attention while the others have nothing to do.
  if (options.attention.asked() && job.launch.rank > 0) return ExitCode::kDone;
  const Evaluation run(options, job);
  const HeldLog held;
  if (options.attention.asked()) {
    evaluate_attention(run);
  } else if (options.tasks.asked()) {
    evaluate_text_tasks(run);
  } else if (options.reach) {
    evaluate_reach(run);
  } else if (options.benefit > 0) {
    evaluate_benefit(run);
  } else if (!options.lengths.empty()) {
    evaluate_lengths(run);
  } else if (options.window > 0) {
    evaluate_sliding(run);
  } else if (run.config.data.task.active() && options.data.empty()) {
    evaluate_task(run);
  } else {
    evaluate_rows(run);
  }
  return ExitCode::kDone;
}

ExitCode run_eval(const EvalOptions& options) {
  return run_on_ranks({.prepare =
                           [&](const Launch&) {
                             options.check();
                             options.attention.check();
                             options.tasks.text_tasks.check(options.lengths);
                             return Deadlines{};
                           },
                       .ranks =
                           [&] {
                             if (options.attention.asked()) return 1;
                             return ranks_for_gpus(options.gpus, select_backend(options.device));
                           },
                       .work = [&](const Job& job) { return evaluate_as(options, job); }});
}

void add_windows(Command command, EvalOptions& options) {
  const Check positive = whole_numbers(int64_t{1}, kMostTokens);
  const char* by_length = "By length of the context";
  const char* sliding = "Sliding window";
  Option lengths =
      command
          .add_option("--lengths", options.lengths,
                      "Loss in windows of exactly these numbers of tokens, such as 512,1024,2048; "
                      "with --tasks: the lengths of prompt and answer")
          .delimiter(',')
          .check(positive)
          .group(by_length);
  options.tokens_per_length_option =
      command
          .add_option("--tokens-per-length", options.tokens_per_length,
                      "Tokens to evaluate for each length at most; at least one window")
          .check(positive)
          .capture_default_str()
          .group(by_length);
  options.bootstrap_option =
      command
          .add_option("--bootstrap", options.bootstrap,
                      "Draws of documents for the 95% intervals of losses; 0: no intervals")
          .check(whole_numbers(int64_t{0}, int64_t{1} << 20))
          .capture_default_str()
          .group(by_length);
  command
      .add_option("--same-targets", options.same_targets,
                  "Count this number of last targets of the longest length's windows, the same "
                  "ones for every length, so that only the context before them grows")
      .check(positive)
      .needs(lengths)
      .group(by_length);
  command
      .add_option("--position-bin", options.position_bin,
                  "Positions that share one mean loss in the JSON")
      .check(positive)
      .capture_default_str()
      .needs(lengths)
      .group(by_length);
  const char* benefit_group = "What the context is worth";
  Option benefit =
      command
          .add_option("--benefit", options.benefit,
                      "Loss with this number of tokens of context minus the loss with only the "
                      "last 64, 128, ... of them, on the same targets")
          .check(whole_numbers(kShortestContext, kMostTokens))
          .excludes(lengths)
          .group(benefit_group);
  command
      .add_option("--benefit-targets", options.benefit_targets,
                  "Last targets of each window that count")
      .check(positive)
      .capture_default_str()
      .needs(benefit)
      .group(benefit_group);
  Option reach =
      command
          .add_flag("--reach", options.reach,
                    "The share of the keys that each layer and head reads in windows of --lengths, "
                    "of a model that skips keys")
          .needs(lengths)
          .excludes(command.get_option("--recall"))
          .group("Attention");
  reach.excludes(command.get_option("--same-targets"));
  Option window =
      command
          .add_option("--window", options.window,
                      "Loss of whole documents in overlapping windows of this number of tokens")
          .check(positive)
          .excludes(lengths)
          .excludes(benefit)
          .excludes(command.get_option("--sequence-length"))
          .group(sliding);
  for (const char* other : {"--tokens", "--sequence-length"}) {
    lengths.excludes(command.get_option(other));
    benefit.excludes(command.get_option(other));
  }
  command
      .add_option("--stride", options.stride,
                  "Tokens between the starts of windows; 0: half a window")
      .check(whole_numbers(int64_t{0}, kMostTokens))
      .needs(window)
      .group(sliding);
}

}  // namespace

void add_eval(Command app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  Command command = app.add_subcommand("eval", "Loss and perplexity of a checkpoint");
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  command.add_option("--data", options->data,
                     "HDF5 document stores; default: the validation data of the run, or the "
                     "held-out examples of its task");
  command
      .add_option("--tokens", options->tokens,
                  "Tokens to evaluate at most, spread evenly over the data; 0: all")
      .check(whole_numbers(int64_t{0}, kAllTokens))
      .capture_default_str();
  command
      .add_option("--sequence-length", options->sequence_length,
                  "Tokens of context at most; 0: as in training")
      .check(whole_numbers(int64_t{0}, kMostTokens))
      .capture_default_str();
  command.add_flag("--ema", options->ema,
                   "Evaluate the average of the weights that the run keeps (train.ema)");
  command.add_flag("--recall", options->recall,
                   "Also split by whether the context holds the token or bigram already (AR)");
  options->rope.add(command);
  command.add_option("--tokenizer", options->tokenizer,
                     "Tokenizer of the training data, for bits per byte; default: the run's");
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  command
      .add_option("--gpus", options->gpus,
                  "GPUs of this machine that share the data; default: all. Not for ranks that a "
                  "launcher has started")
      .check(whole_numbers(1, 1024));
  options->json = command
                      .add_option("--json", options->json_file,
                                  "Print one JSON object, or write it to this file; -: print it")
                      .expected(0, 1);
  add_windows(command, *options);
  options->attention.add(command);
  options->tasks.add(command);
  command.callback([options, &action] {
    if (options->json_file == "-") options->json_file.clear();
    action = [options] { return run_eval(*options); };
  });
}

}  // namespace sbtrain
