// The part of sbtrain eval that looks at attention: dumps of maps, and their overlap with the
// positions that a task says are the true ones.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/task.h"
#include "eval/attention_overlap.h"
#include "serve/inference.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sbtrain {

struct AttentionEvalOptions {
  std::string maps;                // folder to write maps to
  std::string text;                // what to look at: text,
  std::vector<int32_t> token_ids;  // or tokens
  int64_t task_example = -1;       // or a held-out example of the run's task
  std::string true_positions;      // JSON file with examples
  int64_t task_positions = 0;      // or so many held-out examples of the run's task
  double threshold = 0.5;
  const CLI::Option* threshold_option = nullptr;  // given or not

  void add(CLI::App& command);
  void check() const;  // throws ExitCode::kUsage for options that do not go together
  bool asked() const { return !maps.empty() || !true_positions.empty() || task_positions > 0; }
  bool of_task() const { return task_example >= 0 || task_positions > 0; }
};

// What a model looks at, and where it should look.
struct AttentionExample {
  std::vector<int32_t> tokens;
  std::vector<TruePosition> positions;
};

inline constexpr int64_t kMaxMapTokens = 4096;

// Writes `maps.json` and a file for each head:  f32 [T, T], row j what token j attends to; with a
// remainder f32 [T] behind it. Returns what maps.json holds. `tokenizer` may be empty for token
// ids. `task` is null, or the task that --task-example names an example of. Throws ExitCode::kUsage
// for no token, more than kMaxMapTokens, or a token outside the vocabulary.
nlohmann::ordered_json dump_attention_maps(InferenceModel& model,
                                           const AttentionEvalOptions& options,
                                           const std::string& tokenizer, const Task* task);

// The examples of --true-positions, or of `task` where --task-positions asks for them, against
// every head.
nlohmann::ordered_json measure_overlap(InferenceModel& model, const AttentionEvalOptions& options,
                                       const Task* task);

}  // namespace sbtrain
