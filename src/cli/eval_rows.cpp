// sbtrain eval: loss and perplexity of rows of the data, as in training.
#include <chrono>
#include <numeric>
#include <vector>

#include "cli/eval_results.h"
#include "eval/rank_sums.h"

namespace sbtrain {
namespace {

struct RowScores {
  Perplexity total;
  Recall recall;
  void visit(const auto& f) {
    total.visit(f);
    recall.visit(f);
  }
};

RowScores score_rows(const Evaluation& run, const HeldOut& held_out, InferenceModel& model,
                     int64_t length) {
  const auto of_batch = [&](int64_t i) {
    const PackedBatch batch = held_out.batch(i);
    RowScores scores{.total = {.tokens = batch.valid_targets, .bytes = held_out.bytes(batch)},
                     .recall = {}};
    if (!run.options.recall) {
      scores.total.loss_sum = model.score(batch, length).loss_sum;
      return scores;
    }
    const std::vector<float> losses = model.losses(batch, length);
    scores.recall.add(batch, losses);
    scores.total.loss_sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    return scores;
  };
  return sum_over_ranks<RowScores>(run.ranks, held_out.batches(), {}, of_batch);
}

}  // namespace

void evaluate_rows(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const int64_t length = run.sequence_length();
  const MemoryReport plan = run.plan(length);
  const HeldOut held_out(run.held_out(length));
  if (held_out.empty()) fail_without_data();
  InferenceModel model(run.config.model, run.checkpoint, run.backend, plan);
  const auto start = std::chrono::steady_clock::now();
  const auto [result, recall] = score_rows(run, held_out, model, length);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!run.shows()) return;
  if (options.json.given()) {
    Json json = run.header();
    json["sequence_length"] = length;
    add_result(json, result);
    if (options.recall) json["recall"] = recall_json(recall);
    write_json(options, json);
    if (options.prints_json()) return;
  }
  print_result(fmt::format("{}, {} tokens predicted in sequences of {}, {:.1f} s", run.step(),
                           result.tokens, length, seconds),
               result);
  if (options.recall) print_recall(recall);
}

}  // namespace sbtrain
