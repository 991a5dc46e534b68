// sbtrain eval --lengths: losses in windows of exactly so many tokens.
#include <algorithm>
#include <cmath>

#include "cli/eval_results.h"
#include "train/bits.h"

namespace sbtrain {
namespace {

constexpr int64_t kMaxExactPositions = 4096;  // longer windows report losses by bin only

// null where a position has no target.
Json means(const WindowScores& scores, int64_t bin) {
  Json json = Json::array();
  for (const double mean : binned_losses(scores, bin)) {
    json.push_back(std::isnan(mean) ? Json() : Json(mean));
  }
  return json;
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

}  // namespace

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

}  // namespace sbtrain
