// sbtrain eval --benefit: what the far context is worth.
#include <utility>
#include <vector>

#include "cli/eval_results.h"

namespace sbtrain {
namespace {

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

}  // namespace

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

}  // namespace sbtrain
