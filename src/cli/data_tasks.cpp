// sbtrain data tasks: prompts of text tasks with their answers, as documents to train on.
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/cli.h"
#include "cli/text_tasks.h"
#include "core/files.h"
#include "core/in_parallel.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

constexpr int64_t kDocumentsAtOnce = 4096;  // in memory

struct DataTasksOptions {
  TextTaskSelection selection;
  std::vector<int64_t> lengths;
  std::string tokenizer;
  std::string output;
};

// The prompt, and the answers as a model that has read it would give them.
std::string document(const TextTask& task, int64_t length, int64_t index) {
  const auto [text, answers] = task.text(length, index);
  const nlohmann::ordered_json line = {
      {"text", fmt::format("{} {}.", text, fmt::join(answers, ", "))},
      {"source", name_of(task.kind())}};
  return line.dump() + "\n";
}

ExitCode run_data_tasks(const DataTasksOptions& options) {
  const TextTaskSelection& selection = options.selection;
  selection.check(options.lengths);
  check_output(options.output,
               std::vector{options.tokenizer, selection.haystack, selection.word_list});
  const Tokenizer tokenizer(options.tokenizer);
  const auto tasks = make_text_tasks(
      selection, [&](const std::string& prompt) { return tokenizer.encode(prompt); });
  for (const auto& task : tasks) {
    for (const int64_t length : options.lengths) {
      const std::string problem = task->problem(length, selection.samples);
      if (!problem.empty()) fail(ExitCode::kUsage, "--lengths: {}: {}", length, problem);
    }
  }
  AtomicFile file(options.output);
  for (const auto& task : tasks) {
    for (const int64_t length : options.lengths) {
      for (int64_t first = 0; first < selection.samples; first += kDocumentsAtOnce) {
        std::vector<std::string> lines(
            static_cast<size_t>(std::min(kDocumentsAtOnce, selection.samples - first)));
        in_parallel(static_cast<int64_t>(lines.size()), [&](int64_t i) {
          lines[static_cast<size_t>(i)] = document(*task, length, first + i);
        });
        for (const std::string& line : lines) file.write(line);
      }
    }
  }
  file.commit();
  return ExitCode::kDone;
}

}  // namespace

void add_data_tasks(Command group, Action& action) {
  auto options = std::make_shared<DataTasksOptions>();
  options->selection.seed = 1;  // eval --tasks has other samples unless it is asked for these
  Command command = group.add_subcommand(
      "tasks", "Write prompts of text tasks with their answers, as JSON lines for prepare");
  options->selection.add(command, "Tasks of which to write samples").required();
  command
      .add_option("--lengths", options->lengths,
                  "Numbers of tokens, as eval --tasks counts them: of a prompt, and of the most "
                  "that a model may then generate")
      .required()
      .delimiter(',')
      .check(whole_numbers(int64_t{1}, int64_t{1} << 24));
  command.add_option("--tokenizer", options->tokenizer, "Tokenizer that counts these tokens")
      .required();
  command.add_option("--output", options->output, "File to write").required();
  command.callback([options, &action] { action = [options] { return run_data_tasks(*options); }; });
}

}  // namespace sbtrain
