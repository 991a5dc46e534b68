// sbtrain eval: answers to the held-out examples of the synthetic task that a run was trained on.
#include <algorithm>

#include "cli/eval_results.h"
#include "eval/task_accuracy.h"

namespace sbtrain {

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

}  // namespace sbtrain
