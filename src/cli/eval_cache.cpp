#include "cli/eval_cache.h"

#include <algorithm>
#include <chrono>

#include "cli/cache_options.h"
#include "core/in_parallel.h"
#include "serve/decode_batch.h"

namespace sbtrain {
namespace {

constexpr int64_t kMostSlots = 64;  // with the same bits (serve/decode_batch.h)

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

}  // namespace sbtrain
