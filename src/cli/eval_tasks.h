// The part of sbtrain eval that lets a model answer tasks in plain text.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/run_tokenizer.h"
#include "data/tokenizer.h"
#include "eval/text_task.h"
#include "parallel/control.h"
#include "serve/inference.h"

namespace CLI {
class App;
}

namespace sbtrain {

struct TextTaskEvalOptions {
  std::vector<std::string> tasks;  // names of TextTaskKind
  int64_t samples = 100;           // of each length
  std::vector<double> depths;      // as in TextTaskOptions
  std::string haystack;            // file with the text for needle_local_*
  std::string word_list;           // file with the words for cwe
  uint64_t seed = 42;

  // To be called when the command has its other options, of which --tasks excludes many.
  void add(CLI::App& command);
  // Throws ExitCode::kUsage for options that do not go together.
  void check(const std::vector<int64_t>& lengths) const;
  bool asked() const { return !tasks.empty(); }
};

// The tasks of --tasks for the tokenizer of a model.
class TextTaskEvaluation {
 public:
  // Reads the files of the options. `tokenizer` must outlive this.
  TextTaskEvaluation(const TextTaskEvalOptions& options, const Tokenizer& tokenizer,
                     const TrainingText& training);

  // The memory for generating up to `length` tokens, their prompt included.
  MemoryReport plan(const ModelConfig& config, Backend backend, int64_t length) const;

  // Scores all tasks at all lengths, and prints a table if `table` is set. Returns {"seed",
  // "depths", "tasks"}. Every rank calls it.
  nlohmann::ordered_json run(Control& ranks, InferenceModel& model,
                             const std::vector<int64_t>& lengths, bool table) const;

 private:
  nlohmann::ordered_json score(Control& ranks, InferenceModel& model, const TextTask& task,
                               int64_t length, bool table) const;
  const TextTaskEvalOptions& options_;
  const Tokenizer& tokenizer_;
  std::vector<std::unique_ptr<TextTask>> tasks_;
};

}  // namespace sbtrain
