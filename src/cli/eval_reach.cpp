// sbtrain eval --reach: the share of the keys that layers and heads read.
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "cli/eval_results.h"
#include "eval/reach.h"

namespace sbtrain {
namespace {

// Ranks that might share a window (train.context_parallel).
constexpr std::array kShared = {2, 4, 8};

Json share_json(const KeysRead& keys) {
  return keys.visible > 0 ? Json(share_read(keys)) : Json();
}

Json reach_json(const ModelConfig& model, const HeadReach& reach) {
  Json layers = Json::array();
  for (size_t l = 0; l < reach.size(); ++l) {
    Json heads = Json::array();
    for (const KeysRead& head : reach[l]) heads.push_back(share_json(head));
    const KeysRead all = all_of(reach[l]);
    Json layer = {{"layer", l},
                  {"module", model.attention[l % model.attention.size()].type},
                  {"keys_read", share_json(all)},
                  {"heads", std::move(heads)}};
    if (all.visible > 0) {
      for (const int ranks : kShared) {
        layer["hops"][std::to_string(ranks)] = hops_needed(all, ranks);
      }
      layer["queries_beyond_eighths"] = all.beyond;
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

// A module that never skips a key has a dash. The last columns are the hops of keys that a layer
// needs where so many ranks share a window.
void print_reach(const HeadReach& reach) {
  const auto percent = [](const KeysRead& keys) {
    return keys.visible > 0 ? fmt::format("{:.1f}%", 100 * share_read(keys)) : std::string("-");
  };
  fmt::print("{:>8}{:>8}", "layer", "all");
  for (size_t h = 0; h < reach.front().size(); ++h) fmt::print("{:>8}", fmt::format("h{}", h));
  for (const int ranks : kShared) fmt::print("{:>8}", fmt::format("of {}", ranks));
  fmt::print("\n");
  for (size_t l = 0; l < reach.size(); ++l) {
    const KeysRead all = all_of(reach[l]);
    fmt::print("{:>8}{:>8}", l, percent(all));
    for (const KeysRead& head : reach[l]) fmt::print("{:>8}", percent(head));
    for (const int ranks : kShared) {
      const int hops = hops_needed(all, ranks);
      fmt::print("{:>8}", all.visible > 0 ? std::to_string(hops) : "-");
    }
    fmt::print("\n");
  }
}

}  // namespace

void evaluate_reach(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const MemoryReport plan =
      run.plan(*std::max_element(options.lengths.begin(), options.lengths.end()));
  const WindowReader reader(run.held_out(1));
  if (reader.empty()) fail_without_data();
  const ModelConfig& config = run.config.model;
  InferenceModel model(config, run.checkpoint, run.backend, plan);
  Json results = Json::array();
  for (const int64_t length : options.lengths) {
    if (length > reader.longest_document()) {
      fail(ExitCode::kUsage, "--lengths: no document has {} tokens; the longest has {}", length,
           reader.longest_document());
    }
    const std::vector<Window> windows = reader.of_length(length, options.tokens_per_length);
    const HeadReach reach =
        measure_reach(run.ranks, reader, windows, length, config.layers, config.heads,
                      [&](const PackedBatch& batch, int64_t max_seqlen) {
                        return model.keys_read_by_head(batch, max_seqlen);
                      });
    const KeysRead all = all_of(reach);
    if (all.visible == 0) {
      fail(ExitCode::kUsage,
           "--reach: the model has no attention that skips keys: none has the option skip_epsilon");
    }
    results.push_back({{"length", length},
                       {"windows", windows.size()},
                       {"keys_read", share_json(all)},
                       {"layers", reach_json(config, reach)}});
    if (!run.shows() || options.prints_json()) continue;
    fmt::print("{} windows of {} tokens, {:.1f}% of their keys are read\n", windows.size(), length,
               100 * share_read(all));
    print_reach(reach);
    std::fflush(stdout);
  }
  if (!run.shows() || !options.json.given()) return;
  Json json = run.header();
  json["train_length"] = run.config.train.sequence_length;
  json["reach"] = std::move(results);
  write_json(options, json);
}

}  // namespace sbtrain
