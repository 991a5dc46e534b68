// The part of sbtrain eval that lets a model answer tasks in plain text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/run_tokenizer.h"
#include "cli/text_tasks.h"
#include "eval/text_scores.h"
#include "job/control.h"
#include "serve/inference.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

struct TextTaskEvalOptions {
  TextTaskSelection text_tasks;
  int64_t slots = 64;  // prompts that are continued together at most

  // To be called when the command has its other options, of which --tasks excludes many.
  void add(Command command);
  bool asked() const { return !text_tasks.tasks.empty(); }
};

// The tasks of --tasks for the tokenizer of a model.
class TextTaskEvaluation {
 public:
  // Reads the files of the options. `tokenizer` must outlive this.
  TextTaskEvaluation(const TextTaskEvalOptions& options, const std::vector<int64_t>& lengths,
                     const Tokenizer& tokenizer, const TrainingText& training,
                     const KeyDropping& dropping);

  // Chooses for each length how many prompts are continued together: as many as --slots allows and
  // `room` bytes hold, weights included, or one. Returns the plan of the length that takes most.
  MemoryReport plan(const ModelConfig& config, Backend backend, size_t room);

  // What is known so far: {"seed", "depths", "tasks"}.
  using Progress = std::function<void(const nlohmann::ordered_json& results)>;
  // Scores all tasks at all lengths after plan(), prints a table if `table` is set, and calls
  // `progress` after each length. Every rank calls it.
  nlohmann::ordered_json run(Control& ranks, InferenceModel& model, bool table,
                             const Progress& progress) const;

 private:
  // A length, and how many prompts of it are continued together.
  struct Length {
    int64_t tokens = 0;
    int64_t slots = 1;
  };
  nlohmann::ordered_json score(Control& ranks, InferenceModel& model, const TextTask& task,
                               const Length& length, bool table) const;
  // `use` becomes what the prompts of this rank have had in the cache, where keys are dropped.
  std::vector<SampleScore> answer(Control& ranks, InferenceModel& model, const TextTask& task,
                                  const Length& length, CacheUse& use) const;
  const TextTaskEvalOptions& options_;
  const Tokenizer& tokenizer_;
  KeyDropping dropping_;
  std::vector<Length> lengths_;
  std::vector<std::unique_ptr<TextTask>> tasks_;
};

}  // namespace sbtrain
