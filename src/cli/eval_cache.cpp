// sbtrain eval --drop-below: what a cache loses that drops keys by their gates.
#include "cli/eval_cache.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cli/cache_options.h"
#include "cli/eval_results.h"
#include "cli/evaluation.h"
#include "core/in_parallel.h"
#include "eval/rank_sums.h"
#include "eval/windows.h"
#include "model/inference/decode_cache.h"
#include "serve/decode_batch.h"

namespace sbtrain {
namespace {

// That windows which are continued token by token may take.
constexpr std::chrono::hours kLongWindows{4};

// The bytes of all keys of `tokens` tokens, and how many they are, in the layers with gates.
CacheUse use_of_all(const Transformer& model, const Memory& memory, int64_t tokens) {
  const ModelConfig& config = model.config();
  CacheUse use;
  for (int64_t l = 0; l < config.layers; ++l) {
    if (model.block(l).attention().drops_keys()) use.seen += tokens * config.key_heads();
  }
  use.kept = use.seen;
  use.bytes = use.seen * kept_key_bytes(config, memory.compute_dtype());
  return use;
}

// Sums over windows that were continued token by token from their first one.
struct CacheScore {
  Perplexity total;
  int64_t windows = 0;
  int64_t seen = 0;  // keys of their tokens, over the layers with gates and their heads
  int64_t kept = 0;
  int64_t bytes = 0;    // that they take in the end
  double seconds = 0;   // of the decode steps
  int64_t stepped = 0;  // tokens in them
  void visit(const auto& f) {
    total.visit(f);
    f(windows);
    f(seen);
    f(kept);
    f(bytes);
    f(seconds);
    f(stepped);
  }
};

// Adds the losses of the targets that follow token t of each document.
void add_losses(CacheScore& score, DecodeBatch& batch, const PackedBatch& from,
                const std::vector<int64_t>& slots, int64_t t) {
  batch.fetch_logits();
  std::vector<double> losses(slots.size());
  in_parallel(static_cast<int64_t>(slots.size()), [&](int64_t i) {
    const auto n = static_cast<size_t>(i);
    const int32_t target = from.targets[static_cast<size_t>(from.cu_seqlens[n] + t)];
    if (target < 0) return;
    losses[n] = -token_logprob(batch.logits(slots[n]), target, /*top=*/0).logprob;
  });
  for (size_t n = 0; n < slots.size(); ++n) {
    if (from.targets[static_cast<size_t>(from.cu_seqlens[n] + t)] < 0) continue;
    score.total.loss_sum += losses[n];
    ++score.total.tokens;
  }
}

// How many windows of `length` tokens can be continued together: 64, or fewer where `room` bytes do
// not hold them, weights included, but one at least. `plan` becomes what takes most.
int64_t slots_for_windows(const ModelConfig& config, Backend backend,
                          const CacheEvalOptions& options, int64_t length, size_t room,
                          MemoryReport& plan) {
  const auto of = [&](int64_t slots) {
    MemoryReport largest;
    for (const double below : options.drop_below) {
      MemoryReport report = plan_serving(config, backend, slots, std::max<int64_t>(length, 2),
                                         /*prompts_in_parts=*/false, options.dropping(below));
      if (report.total_bytes() > largest.total_bytes()) largest = std::move(report);
    }
    return largest;
  };
  int64_t slots = kMostSlots;
  MemoryReport mine = of(slots);
  while (slots > 1 && mine.total_bytes() > room) mine = of(slots /= 2);
  if (mine.total_bytes() > plan.total_bytes()) plan = std::move(mine);
  return slots;
}

// Scores documents of `from` of `length` tokens each, all of them at once.
CacheScore score_decoded(InferenceModel& model, const PackedBatch& from, int64_t documents,
                         int64_t length, const KeyDropping& dropping) {
  DecodeBatch batch(model.model(), model.params(), model.stream(), documents,
                    std::max<int64_t>(length, 2), {.dropping = dropping});
  CacheScore score;
  score.windows = documents;
  std::vector<int64_t> slots;
  for (int64_t n = 0; n < documents; ++n) {
    const int32_t first = from.tokens[static_cast<size_t>(from.cu_seqlens[static_cast<size_t>(n)])];
    slots.push_back(batch.start({&first, 1}));
  }
  add_losses(score, batch, from, slots, 0);
  std::vector<int32_t> next(static_cast<size_t>(documents));
  for (int64_t t = 1; t < length; ++t) {
    for (size_t n = 0; n < slots.size(); ++n) {
      next[static_cast<size_t>(slots[n])] =
          from.tokens[static_cast<size_t>(from.cu_seqlens[n] + t)];
    }
    const auto start = std::chrono::steady_clock::now();
    batch.step(next);
    score.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    score.stepped += documents;
    add_losses(score, batch, from, slots, t);
  }
  const CacheUse use = dropping.active()
                           ? batch.cache_use(/*now=*/true)
                           : use_of_all(model.model(), model.stream().memory(), documents * length);
  score.seen = use.seen;
  score.kept = use.kept;
  score.bytes = use.bytes;
  return score;
}

Json cache_json(const EvalOptions& options, int64_t length, double below, int64_t slots,
                const CacheScore& score) {
  Json json = {{"length", length}, {"drop_below", below}, {"cache_share", options.cache.share}};
  json["windows"] = score.windows;
  json["sequences"] = slots;
  add_result(json, score.total);
  json["share_kept"] = static_cast<double>(score.kept) / static_cast<double>(score.seen);
  json["bytes_per_window"] = static_cast<double>(score.bytes) / static_cast<double>(score.windows);
  json["tokens_per_second"] = static_cast<double>(score.stepped) / score.seconds;
  return json;
}

void print_cache(const Json& row) {
  fmt::print("{:>8}{:>12g}{:>9}{:>10}{:>9.4f}{:>9.1f}%{:>12.3f}{:>11.0f}\n",
             row["length"].get<int64_t>(), row["drop_below"].get<double>(),
             row["windows"].get<int64_t>(), row["tokens"].get<int64_t>(), row["loss"].get<double>(),
             100 * row["share_kept"].get<double>(), row["bytes_per_window"].get<double>() / 1e6,
             row["tokens_per_second"].get<double>());
  std::fflush(stdout);
}

}  // namespace

void CacheEvalOptions::add(Command command) {
  const Option below =
      command
          .add_option("--drop-below", drop_below,
                      "Loss in windows of --lengths that are continued token by token with a cache "
                      "that keeps no keys of heads whose forget gates are below this, such as "
                      "0,0.01,0.1; with --tasks: one such bound")
          .delimiter(',')
          .check(in_range(0.0, 1.0))
          .needs(command.get_option("--lengths"))
          .group("Cache");
  for (const char* other : {"--recall", "--same-targets", "--reach", "--window", "--benefit"}) {
    below.excludes(command.get_option(other));
  }
  add_cache_share(command, share, below);
}

void evaluate_cache(const Evaluation& run) {
  const EvalOptions& options = run.options;
  const ModelConfig& config = run.config.model;
  MemoryReport plan;
  std::vector<int64_t> slots;
  require_droppable(Transformer(config), {.below = 1});
  for (const int64_t length : options.lengths) {
    slots.push_back(
        slots_for_windows(config, run.backend, options.cache, length, run.room(), plan));
  }
  run.require_memory_for(plan);
  const WindowReader reader(run.held_out(1));
  if (reader.empty()) fail_without_data();
  InferenceModel model(config, run.checkpoint, run.backend, plan);
  const bool table = run.shows() && !options.prints_json();
  if (table) {
    fmt::print("{:>8}{:>12}{:>9}{:>10}{:>9}{:>10}{:>12}{:>11}\n", "length", "drop below", "windows",
               "tokens", "loss", "kept", "MB a window", "tokens/s");
  }
  Json results = Json::array();
  for (size_t i = 0; i < options.lengths.size(); ++i) {
    const int64_t length = options.lengths[i];
    const std::vector<Window> windows = reader.of_length(length, options.tokens_per_length);
    if (windows.empty()) {
      fail(ExitCode::kUsage, "--lengths: no document has {} tokens; the longest has {}", length,
           reader.longest_document());
    }
    const int64_t groups = (static_cast<int64_t>(windows.size()) + slots[i] - 1) / slots[i];
    for (const double below : options.cache.drop_below) {
      const auto of_group = [&](int64_t group) {
        const auto first = static_cast<size_t>(group * slots[i]);
        const size_t count = std::min(windows.size() - first, static_cast<size_t>(slots[i]));
        run.ranks.progress(fmt::format("windows of {} tokens", length), kLongWindows);
        return score_decoded(model,
                             reader.batch_of(std::span(windows).subspan(first, count), length),
                             static_cast<int64_t>(count), length, options.cache.dropping(below));
      };
      const CacheScore score = sum_over_ranks<CacheScore>(run.ranks, groups, {}, of_group);
      results.push_back(cache_json(options, length, below, slots[i], score));
      if (table) print_cache(results.back());
    }
  }
  if (!run.shows() || !options.json.given()) return;
  Json json = run.header();
  json["train_length"] = run.config.train.sequence_length;
  json["rope_scaling"] = run.rope_scaling();
  json["data"] = reader.content_hashes();
  json["cache"] = std::move(results);
  write_json(options, json);
}

}  // namespace sbtrain
