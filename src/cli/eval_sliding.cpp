// sbtrain eval --window: losses of whole documents in overlapping windows.
#include "cli/eval_results.h"

namespace sbtrain {

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

}  // namespace sbtrain
