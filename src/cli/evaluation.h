// What the modes of sbtrain eval share: their options, and the model and data of an evaluation.
// Each mode has a file of its own.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/eval_attention.h"
#include "cli/eval_cache.h"
#include "cli/eval_tasks.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "cli/rope_options.h"
#include "config/schema.h"
#include "data/task.h"
#include "eval/perplexity.h"
#include "serve/inference.h"

namespace sbtrain {

using Json = nlohmann::ordered_json;

inline constexpr int64_t kAllTokens = int64_t{1} << 60;
inline constexpr int64_t kShortestContext = 64;  // of --benefit

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
  CacheEvalOptions cache;
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

// The model, data and options of an evaluation, shared by all kinds.
struct Evaluation {
  Evaluation(const EvalOptions& options, const Job& job);

  // Every file that an evaluation may read.
  std::vector<std::string> inputs() const;
  std::string tokenizer() const;
  HeldOutOptions held_out(int64_t length) const;
  int64_t sequence_length() const {
    return options.sequence_length > 0 ? options.sequence_length : config.train.sequence_length;
  }
  Task task() const {
    return {config.data.task, config.model.vocab, sequence_length(), config.seed};
  }
  // The memory for rows of `length` tokens. Refuses a length for which the device has too little,
  // so it is called before anything is read.
  MemoryReport plan(int64_t length) const;
  // Refuses what the device has too little memory for, or the ranks of a machine together.
  void require_memory_for(const MemoryReport& plan) const;
  // The bytes of its device that this rank may take.
  size_t room() const;
  // As many tokens as one micro-batch of the training run.
  int64_t tokens_at_once() const { return config.train.micro_batch * config.train.sequence_length; }
  Json header() const;
  // Which weights are evaluated.
  std::string step() const;
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

// For a run without validation data, where none is given.
[[noreturn]] void fail_without_data();

// The modes. Every rank of the job calls them, but evaluate_attention(), which one rank calls.
void evaluate_rows(const Evaluation& run);     // losses of rows of the data
void evaluate_lengths(const Evaluation& run);  // --lengths
void evaluate_sliding(const Evaluation& run);  // --window
void evaluate_benefit(const Evaluation& run);  // --benefit
void evaluate_reach(const Evaluation& run);    // --reach
void evaluate_cache(const Evaluation& run);    // --drop-below, without --tasks
void evaluate_attention(
    const Evaluation& run);                 // --attention-maps, --true-positions, --task-positions
void evaluate_task(const Evaluation& run);  // held-out examples of the run's task
void evaluate_text_tasks(const Evaluation& run);  // --tasks

}  // namespace sbtrain
