// The part of sbtrain eval that examines attention: files of attention maps, and the overlap of
// attention with the true positions of a task.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/run_tokenizer.h"
#include "data/task.h"
#include "eval/attention_overlap.h"
#include "serve/inference.h"

namespace sbtrain {

struct AttentionEvalOptions {
  std::string maps;                // folder to write maps to
  std::string text;                // the input of the maps: text,
  std::vector<int32_t> token_ids;  // or tokens,
  int64_t task_example = -1;       // or a held-out example of the run's task
  std::string true_positions;      // JSON file with examples
  int64_t task_positions = 0;      // or this number of held-out examples of the run's task
  double threshold = 0.5;
  Option threshold_option{};  // tells whether the threshold was given

  // To be called when the command has its options of losses, which these exclude.
  void add(Command command);
  void check() const;  // throws ExitCode::kUsage for options that do not go together
  bool asked() const { return !maps.empty() || !true_positions.empty() || task_positions > 0; }
  bool of_task() const { return task_example >= 0 || task_positions > 0; }
};

// The input of a model, and the positions that its queries should attend to.
struct AttentionExample {
  std::vector<int32_t> tokens;
  std::vector<TruePosition> positions;
};

inline constexpr int64_t kMaxMapTokens = 4096;

// Writes `maps.json` and a file for each head: f32 [T, T], whose row j holds the weights with which
// token j attends, and after it the remainder f32 [T] if there is one. Returns the content of
// maps.json. `tokenizer` is a file, or empty for token ids; it must be that of the training data,
// `training`, like which a text begins. `task` is null, or the task of --task-example.
// Throws ExitCode::kUsage for no tokens, more than kMaxMapTokens, or a token outside of the
// vocabulary.
nlohmann::ordered_json dump_attention_maps(InferenceModel& model,
                                           const AttentionEvalOptions& options,
                                           const std::string& tokenizer,
                                           const TrainingText& training, const Task* task);

// Measures the overlap of every head's attention with the examples of --true-positions, or with
// those of `task` if --task-positions is given.
nlohmann::ordered_json measure_overlap(InferenceModel& model, const AttentionEvalOptions& options,
                                       const Task* task);

}  // namespace sbtrain
