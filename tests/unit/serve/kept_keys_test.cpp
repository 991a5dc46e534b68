// Sequences whose cache drops keys by their forget gates.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "serve/generate.h"
#include "serve/inference.h"
#include "small_model.h"

namespace sbtrain::test::kept_keys {
namespace {

using Logits = std::vector<float>;

constexpr double kNone = 1e-30;  // below which no gate is
constexpr double kMany = 0.95;   // below which many are
constexpr int64_t kCapacity = 200;

// Layers with gates between others; heads of keys that several heads of queries share.
ModelConfig gated_config(int64_t kv_heads) {
  ModelConfig config =
      small_config({"{type: stickbreaking, remainder: value, forget_gate: true, head_norm: true}",
                    "{type: softmax, position: rope}", "{type: stickbreaking, forget_gate: true}",
                    "{type: stickbreaking, attend_current: true, forget_gate: true}"});
  config.kv_heads = kv_heads;
  return config;
}

struct Dropping {
  Dropping(const ModelConfig& config, int64_t slots, const KeyDropping& dropping)
      : run(Backend::kCpu, config, packed_batch({3}, kVocab)),
        batch(run.model(), run.params(), run.stream(), slots, kCapacity, {.dropping = dropping}) {}
  ModelRun run;
  DecodeBatch batch;
};

Logits logits_of(DecodeBatch& batch, int64_t slot) {
  const auto logits = batch.logits(slot);
  return {logits.begin(), logits.end()};
}

// The logits after the prompt and after each of `steps` tokens more, alone.
std::vector<Logits> alone(const ModelConfig& config, const KeyDropping& dropping,
                          const std::vector<int32_t>& prompt, int steps) {
  Dropping model(config, 1, dropping);
  const int64_t slot = model.batch.start(prompt);
  std::vector<Logits> logits = {logits_of(model.batch, slot)};
  for (int i = 0; i < steps; ++i) {
    model.batch.step(std::vector{model.batch.likeliest(slot)});
    logits.push_back(logits_of(model.batch, slot));
  }
  return logits;
}

TEST(KeptKeysCache, WhereNothingIsDroppedHasTheBitsOfOtherCaches) {
  for (const int64_t kv_heads : {3, 1}) {
    const ModelConfig config = gated_config(kv_heads);
    for (const int64_t length : {1, 20, 64, 130}) {
      const auto prompt = random_prompt(length, 3);
      EXPECT_EQ(alone(config, {.below = kNone}, prompt, 70), alone(config, {}, prompt, 70));
    }
  }
}

TEST(KeptKeysCache, HoldsFewerKeysThanTokens) {
  const ModelConfig config = gated_config(0);
  Dropping model(config, 1, {.below = kMany});
  const int64_t slot = model.batch.start(random_prompt(100, 1));
  for (int i = 0; i < 90; ++i) model.batch.step(std::vector{model.batch.likeliest(slot)});
  const CacheUse use = model.batch.cache_use(/*now=*/true);
  EXPECT_EQ(use.seen, 190 * 3 * 3);  // layers with gates, and heads
  EXPECT_LT(use.kept, use.seen * 3 / 4);
  EXPECT_GT(use.kept, use.seen / 20);
  Dropping all(config, 1, {.below = kNone});
  all.batch.start(random_prompt(100, 1));
  EXPECT_EQ(all.batch.cache_use().kept, all.batch.cache_use().seen);
}

// What is dropped matters, so that the tests beside this one would notice if nothing were.
TEST(KeptKeysCache, ChangesWhatFollows) {
  const ModelConfig config = gated_config(0);
  const auto prompt = random_prompt(100, 1);
  const auto dropped = alone(config, {.below = kMany}, prompt, 3);
  const auto all = alone(config, {}, prompt, 3);
  EXPECT_EQ(dropped[0], all[0]);  // the prompt attends to all of itself
  EXPECT_NE(dropped[1], all[1]);
}

// Sequences come and go, and use pages that others have left.
TEST(KeptKeysCache, SequencesDoNotDependOnEachOther) {
  for (const int64_t kv_heads : {3, 1}) {
    const ModelConfig config = gated_config(kv_heads);
    const KeyDropping dropping = {.below = kMany};
    constexpr int64_t kSlots = 4;
    constexpr int kSteps = 40;
    Dropping model(config, kSlots, dropping);
    struct Sequence {
      int64_t slot;
      std::vector<Logits> expected;
      size_t seen = 0;
      bool ready = true;
    };
    std::vector<Sequence> running;
    std::vector<int32_t> next(kSlots);
    uint64_t started = 0;
    while (started < 10 || !running.empty()) {
      if (started < 10 && model.batch.free_slots() > 0 &&
          (running.empty() || running.back().ready)) {
        const auto prompt = random_prompt(1 + static_cast<int64_t>(37 * started % 150), started);
        const bool in_parts = started % 2 == 1;
        running.push_back({in_parts ? model.batch.begin(prompt) : model.batch.start(prompt),
                           alone(config, dropping, prompt, kSteps), 0, !in_parts});
        ++started;
      }
      if (!running.back().ready) {
        int64_t tokens = 1;
        running.back().ready = model.batch.advance(tokens);
      }
      for (size_t i = 0; i < running.size();) {
        Sequence& s = running[i];
        if (!s.ready) {
          ++i;
          continue;
        }
        ASSERT_EQ(logits_of(model.batch, s.slot), s.expected[s.seen]) << s.slot << " " << s.seen;
        next[static_cast<size_t>(s.slot)] = model.batch.likeliest(s.slot);
        if (++s.seen < s.expected.size() - s.expected.size() / 3 * (started % 2)) {
          ++i;
          continue;
        }
        model.batch.stop(s.slot);
        running.erase(running.begin() + static_cast<ptrdiff_t>(i));
      }
      model.batch.step(next);
    }
    EXPECT_EQ(model.batch.cache_use().bytes, 0);
  }
}

// A cache that has no room says so, before anything is wrong, and goes on when others have ended.
TEST(KeptKeysCache, IsFullWhereMoreIsKeptThanItHasRoomFor) {
  const ModelConfig config = gated_config(0);
  // Of 2 slots, 9 heads and 4 pages each.
  const KeyDropping dropping = {.below = kNone, .share = 27.0 / 72};
  Dropping model(config, 2, dropping);
  EXPECT_THROW(model.batch.start(random_prompt(193, 1)), CacheFull);
  EXPECT_EQ(model.batch.free_slots(), 2);
  const auto prompt = random_prompt(70, 2);
  const std::vector<Logits> expected = alone(config, {}, prompt, 80);
  const int64_t first = model.batch.start(prompt);  // 18 pages, and 27 from the 59th step on
  EXPECT_THROW(model.batch.start(random_prompt(100, 3)), CacheFull);
  const int64_t second = model.batch.start(random_prompt(64, 3));  // 9
  EXPECT_EQ(model.batch.make_room(), std::vector{second});
  EXPECT_THROW(model.batch.step(std::vector<int32_t>(2)), CacheFull);
  model.batch.stop(second);
  std::vector<int32_t> next(2);
  for (size_t i = 0; i + 1 < expected.size(); ++i) {
    ASSERT_EQ(logits_of(model.batch, first), expected[i]) << i;
    EXPECT_TRUE(model.batch.make_room().empty());
    next[static_cast<size_t>(first)] = model.batch.likeliest(first);
    model.batch.step(next);
  }
}

TEST(KeptKeysCache, IsPlannedForTheShareThatItMayKeep) {
  const ModelConfig config = gated_config(0);
  const auto attention = [&](const KeyDropping& dropping) {
    const MemoryReport plan = plan_serving(config, Backend::kCpu, 8, 6400, false, dropping);
    return static_cast<double>(
        plan.programs.at(0).at_peak[static_cast<size_t>(MemoryClass::kAttention)]);
  };
  // Of every token: keys, values and gates of 3 layers, and keys and values of the one without
  // gates.
  const double of_gated = 8.0 * 6400 * 3 * (2 * 36 + 3) * 4;
  EXPECT_NEAR(attention({.below = 0.1}) / attention({}), 1.0, 0.02);
  EXPECT_NEAR(attention({.below = 0.1}) - attention({.below = 0.1, .share = 0.25}), 0.75 * of_gated,
              0.01 * of_gated);
}

TEST(KeptKeysCache, IsRefusedWithoutGates) {
  const ModelConfig config = small_config({"{type: stickbreaking}", "{type: softmax}"});
  try {
    Dropping(config, 1, {.below = 0.1});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::kUsage);
    EXPECT_NE(std::string(e.what()).find("forget_gate"), std::string::npos) << e.what();
  }
  EXPECT_THROW(plan_generation(config, Backend::kCpu, 5, 5, {.below = 0.1}), Error);
}

TEST(KeptKeysCache, GenerateTellsWhatIsKept) {
  const ModelConfig config = gated_config(0);
  ModelRun run(Backend::kCpu, config, packed_batch({3}, kVocab));
  const auto prompt = random_prompt(50, 4);
  const SamplingOptions options = {.max_tokens = 30, .temperature = 0};
  CacheUse use;
  const auto tokens = generate(run.model(), run.params(), run.stream(), prompt, options, -1,
                               nullptr, {.below = kMany}, &use);
  EXPECT_EQ(tokens.size(), 30U);
  EXPECT_EQ(use.seen, 79 * 9);  // the last token is not run
  EXPECT_GT(use.kept, 0);
  EXPECT_LT(use.kept, use.seen);
  EXPECT_GT(use.bytes, 0);
  EXPECT_LE(use.bytes, use.most_bytes);
}

}  // namespace
}  // namespace sbtrain::test::kept_keys
