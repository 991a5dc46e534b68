#include "serve/decode_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/inference/decode.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"
#include "serve/generate.h"
#include "serve/inference.h"
#include "small_model.h"

namespace sbtrain::test {
namespace {

using Logits = std::vector<float>;

Logits copy(std::span<const float> logits) {
  return {logits.begin(), logits.end()};
}

int32_t likeliest(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The logits of the prompt's next token and of `steps` likeliest tokens after it, alone.
std::vector<Logits> alone(const ModelConfig& config, const std::vector<int32_t>& prompt,
                          int steps) {
  SmallModel model(config, 1, 200);
  const int64_t slot = model.batch.start(prompt);
  std::vector<Logits> logits = {copy(model.batch.logits(slot))};
  for (int i = 0; i < steps; ++i) {
    model.batch.step(std::vector{likeliest(logits.back())});
    logits.push_back(copy(model.batch.logits(slot)));
  }
  return logits;
}

// Every kind of cache, and the layouts of GPT-2, GPT-NeoX, OLMo 2 and of none.
std::vector<ModelConfig> every_model() {
  std::vector<ModelConfig> models;
  for (const std::vector<std::string>& layers :
       {kAllCaches, {kAllCaches[0]}, {kAllCaches[1]}, {kAllCaches[2]}}) {
    models.push_back(small_config(layers));
  }
  ModelConfig gpt2 = small_config({"{type: softmax, position: none, qkv_bias: true}"});
  gpt2.norm = NormKind::kLayerNorm;
  gpt2.mlp = MlpKind::kGeluTanh;
  gpt2.position = PositionEmbedding::kLearned;
  gpt2.max_positions = 200;
  models.push_back(gpt2);
  ModelConfig neox = small_config({"{type: softmax, rope_fraction: 0.5, output_bias: true}"});
  neox.norm = NormKind::kLayerNorm;
  neox.mlp = MlpKind::kGelu;
  neox.parallel_residual = true;
  models.push_back(neox);
  ModelConfig olmo2 = small_config({"{type: softmax, qk_norm: true, qk_norm_scope: joint}",
                                    "{qk_norm: true, qk_norm_scope: joint}"});
  olmo2.norm_position = NormPosition::kOutput;
  models.push_back(olmo2);
  ModelConfig parallel = small_config(kAllCaches);
  parallel.parallel_residual = true;
  models.push_back(parallel);
  parallel.norm_position = NormPosition::kOutput;
  models.push_back(parallel);
  return models;
}

// Sequences come and go; each sees the bits that it sees alone.
TEST(DecodeBatch, SequencesDoNotDependOnEachOther) {
  for (const ModelConfig& config : every_model()) {
    constexpr int64_t kSlots = 5;
    constexpr int kSteps = 6;
    SmallModel model(config, kSlots);
    struct Sequence {
      int64_t slot;
      std::vector<Logits> expected;
      size_t seen;
    };
    std::vector<Sequence> running;
    std::vector<int32_t> next(kSlots);
    uint64_t started = 0;
    for (int round = 0; round < 24; ++round) {
      // One or two begin in most rounds; those that were first are the first to end, so that free
      // slots lie between used ones.
      for (int i = 0; i < 1 + round % 2 && model.batch.free_slots() > 0; ++i) {
        const auto prompt = random_prompt(1 + (7 * started) % 20, started);
        ++started;
        running.push_back({model.batch.start(prompt), alone(config, prompt, kSteps), 0});
      }
      for (size_t i = 0; i < running.size();) {
        Sequence& s = running[i];
        const Logits logits = copy(model.batch.logits(s.slot));
        ASSERT_EQ(logits, s.expected[s.seen]) << "slot " << s.slot << " step " << s.seen;
        ASSERT_EQ(model.batch.likeliest(s.slot), likeliest(logits));
        next[static_cast<size_t>(s.slot)] = likeliest(logits);
        if (++s.seen < s.expected.size() - static_cast<size_t>(round % 3)) {
          ++i;
          continue;
        }
        model.batch.stop(s.slot);
        running.erase(running.begin() + static_cast<ptrdiff_t>(i));
      }
      model.batch.step(next);
    }
    EXPECT_GE(started, 20U);
  }
}

TEST(DecodeBatch, MoreSequencesThanOneTileOfRows) {
  const ModelConfig config = small_config(kAllCaches);
  constexpr int64_t kSlots = 64;
  SmallModel model(config, kSlots, 16);
  const auto prompt = random_prompt(9, 1);
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    model.batch.start(slot % 3 == 0 ? prompt : random_prompt(1 + slot % 11, slot));
  }
  const std::vector<Logits> expected = alone(config, prompt, 1);
  model.batch.step(std::vector<int32_t>(kSlots, likeliest(expected[0])));
  for (int64_t slot = 0; slot < kSlots; slot += 3) {
    EXPECT_EQ(copy(model.batch.logits(slot)), expected[1]) << slot;
  }
}

// The logits of all prompt tokens are those of a forward pass, and the last ones are those that the
// next token is drawn from, bit for bit.
TEST(DecodeBatch, ShowsTheLogitsOfThePrompt) {
  const ModelConfig config = small_config(kAllCaches);
  for (const int32_t length : {1, 5, 63, 64, 65, 150}) {
    PackedBatch batch = packed_batch({length}, kVocab);
    ModelRun forward(Backend::kCpu, config, batch);
    const std::vector<float> expected = forward.logits();
    SmallModel model(config, 2, 200);
    int64_t seen = 0;
    std::vector<float> last;
    const auto visit = [&](int64_t first, int64_t rows, std::span<const float> logits) {
      ASSERT_EQ(first, seen);
      ASSERT_EQ(logits.size(), static_cast<size_t>(rows * kVocab));
      for (size_t i = 0; i < logits.size(); ++i) {
        ASSERT_NEAR(logits[i], expected[static_cast<size_t>(first * kVocab) + i], 2e-4);
      }
      seen += rows;
      last = copy(logits.last(kVocab));
    };
    const int64_t slot = model.batch.start(batch.tokens, visit);
    EXPECT_EQ(seen, length);
    EXPECT_EQ(copy(model.batch.logits(slot)), last);
    EXPECT_EQ(last, alone(config, batch.tokens, 0)[0]);
  }
}

// draw() takes the likeliest token where it is known, and the logits where they are needed.
TEST(DecodeBatch, DrawsFromTheTokensOfTheVocabulary) {
  const ModelConfig config = small_config({kAllCaches[1]});
  ModelRun run(Backend::kCpu, config, packed_batch({3}, kVocab));
  constexpr int64_t kTokens = 7;
  DecodeBatch batch(run.model(), run.params(), run.stream(), 3, 64, {.vocab = kTokens});
  for (int64_t slot = 0; slot < 3; ++slot) batch.start(random_prompt(5 + slot, slot));
  bool others = false;  // whether all tokens have another likeliest one
  for (int step = 0; step < 8; ++step) {
    for (int64_t slot = 0; slot < 3; ++slot) {
      const Logits logits = copy(batch.logits(slot));
      const int32_t known = likeliest(std::span(logits).first(kTokens));
      EXPECT_EQ(batch.likeliest(slot), known);
      EXPECT_EQ(batch.draw(slot, {.temperature = 0, .vocab = kTokens}, 0), known);
      EXPECT_EQ(batch.draw(slot, {.temperature = 0}, 0), likeliest(logits));
      const SamplingOptions hot = {.temperature = 2, .vocab = kTokens};
      EXPECT_EQ(batch.draw(slot, hot, 3), sample_token(std::span(logits).first(kTokens), hot, 3));
      others = others || likeliest(logits) != known;
    }
    batch.step(std::vector<int32_t>(3, step));
    if (step % 2 == 1) batch.fetch_logits();
  }
  EXPECT_TRUE(others);
}

// Prompts run in parts between the steps of others: all see the bits that they see alone.
TEST(DecodeBatch, PromptsInPartsHaveTheBitsOfWholeOnes) {
  const ModelConfig config = small_config(kAllCaches);
  constexpr int64_t kSlots = 3;
  SmallModel model(config, kSlots, 200);
  const auto other = random_prompt(20, 1);
  const std::vector<Logits> expected_other = alone(config, other, 60);
  // Its slot lies before and after the one of the prompt, which is an idle row of the steps.
  model.batch.start(random_prompt(3, 2));
  const int64_t slot_of_other = model.batch.start(other);
  model.batch.stop(0);
  size_t seen = 0;
  const auto step = [&] {
    ASSERT_EQ(copy(model.batch.logits(slot_of_other)), expected_other[seen]);
    model.batch.step(std::vector<int32_t>(kSlots, likeliest(expected_other[seen++])));
  };
  for (const int64_t tokens : {1, 40, 100, 1000}) {
    for (const bool visits : {false, true}) {
      const auto prompt = random_prompt(130, 7);
      std::vector<Logits> rows, whole;
      const auto keep = [](std::vector<Logits>& to) {
        return [&to](int64_t, int64_t n, std::span<const float> logits) {
          for (int64_t i = 0; i < n; ++i) to.push_back(copy(logits.subspan(i * kVocab, kVocab)));
        };
      };
      SmallModel reference(config, 1, 200);
      reference.batch.start(prompt, keep(whole));
      const int64_t slot =
          visits ? model.batch.begin(prompt, keep(rows)) : model.batch.begin(prompt);
      EXPECT_EQ(slot, 0);
      EXPECT_EQ(model.batch.free_slots(), 1);
      EXPECT_THROW(model.batch.start(other), Error);
      EXPECT_THROW(model.batch.begin(other), Error);
      int parts = 0;
      for (bool done = false; !done; ++parts) {
        int64_t left = tokens;
        done = model.batch.advance(left);
        EXPECT_GE(left, tokens - std::max<int64_t>(tokens, 130 / 4 + 1));  // a part or a layer
        EXPECT_LT(left, tokens);
        if (!done && parts % 40 == 0) step();
      }
      EXPECT_GE(parts, tokens == 1 ? 4 : 1);
      EXPECT_EQ(copy(model.batch.logits(slot)), whole.back());
      if (visits) {
        EXPECT_EQ(rows, whole);
      }
      const std::vector<Logits> expected = alone(config, prompt, 1);
      std::vector<int32_t> next(kSlots, likeliest(expected_other[seen++]));
      next[0] = likeliest(expected[0]);
      model.batch.step(next);
      EXPECT_EQ(copy(model.batch.logits(slot)), expected[1]);
      model.batch.stop(slot);
    }
  }
  // A prompt that is given up leaves its slot.
  const int64_t slot = model.batch.begin(other);
  int64_t left = 1;
  EXPECT_FALSE(model.batch.advance(left));
  model.batch.stop(slot);
  EXPECT_EQ(model.batch.free_slots(), 2);
  EXPECT_THROW(model.batch.advance(left), Error);
  EXPECT_EQ(copy(model.batch.logits(model.batch.start(other))), expected_other[0]);
}

// More prompts than slots, of which some end early: each is continued as if it were alone.
TEST(DecodeBatch, ContinuesManyPromptsAsGenerateContinuesEach) {
  const ModelConfig config = small_config(kAllCaches);
  for (const double temperature : {0.0, 1.0}) {
    const SamplingOptions options = {.max_tokens = 12, .temperature = temperature};
    std::vector<std::vector<int32_t>> prompts, expected;
    size_t ended_early = 0;
    constexpr int32_t kStop = 7;
    for (int i = 0; i < 40; ++i) {
      prompts.push_back(random_prompt(1 + 5 * i % 30, 500 + static_cast<uint64_t>(i)));
      SmallModel model(config);
      expected.push_back(generate(model.run.model(), model.run.params(), model.run.stream(),
                                  prompts.back(), options, kStop));
      ended_early += expected.back().size() < 12;
    }
    EXPECT_GT(ended_early, 0U);
    EXPECT_LT(ended_early, prompts.size());
    for (const int64_t slots : {1, 3, 64}) {
      SmallModel model(config, slots);
      std::vector<size_t> begun;
      EXPECT_EQ(
          generate_all(model.batch, prompts, options, kStop, [&](size_t i) { begun.push_back(i); }),
          expected);
      ASSERT_EQ(begun.size(), prompts.size());
      EXPECT_TRUE(std::ranges::is_sorted(begun));
      EXPECT_EQ(model.batch.free_slots(), slots);
    }
  }
}

// On a GPU steps have a pool of their own, which a plan of generation or serving holds beside the
// memory of prompts.
TEST(DecodeBatch, PlansTheMemoryOfRecordedSteps) {
  ModelConfig config = small_config({kAllCaches[0], kAllCaches[1]});
  config.width = 96;  // of heads that a GPU takes
  const Transformer model(config);
  constexpr int64_t kSlots = 33, kCapacity = 50;
  const auto report_of = [&](Backend target, const auto& work) {
    Memory memory = Memory::planning(target);
    Stream s(memory);
    const auto communicator = make_single_process();
    const Mesh mesh(*communicator);
    ShardedParams params(model.registry(), s, mesh, /*optimizer=*/nullptr);
    DecodeCache cache(memory, model, kSlots, kCapacity);
    const ProgramScope scope(memory, "work");
    work(s, params, cache);
    return memory.report();
  };
  const auto activations = [](const MemoryReport& report) {
    return report.programs.at(0).at_peak[static_cast<size_t>(MemoryClass::kActivations)];
  };
  const auto begin = [&](Stream& s, ShardedParams& params, DecodeCache&) {
    DecodeBatch(model, params, s, kSlots, kCapacity);
  };
  EXPECT_EQ(activations(report_of(Backend::kCpu, begin)), 0U);
  const auto step = [&](Stream& s, ShardedParams& params, DecodeCache& cache) {
    const auto ints = [&](int64_t n) {
      return s.memory().allocate(MemoryClass::kWeights, "ints", DType::kI32, {n});
    };
    const Buffer tokens_B = ints(kSlots), positions_B = ints(kSlots), lengths_B = ints(kSlots);
    const Buffer logits_BV =
        s.memory().allocate(MemoryClass::kWeights, "logits", DType::kF32, {kSlots, kVocab});
    decode(s, model, params, tokens_B, cache,
           {.positions_B = positions_B, .lengths_B = lengths_B, .norm = {}}, logits_BV);
  };
  const size_t planned = activations(report_of(Backend::kCuda, begin));
  EXPECT_GE(planned, activations(report_of(Backend::kCuda, step)));
  EXPECT_GT(activations(report_of(Backend::kCuda, step)), 0U);
  const auto plan = plan_serving(config, Backend::kCuda, kSlots, kCapacity, false);
  EXPECT_GE(activations(plan), planned);
}

TEST(DecodeBatch, RefusesWhatDoesNotFit) {
  SmallModel model(small_config({kAllCaches[0]}), 1, 4);
  EXPECT_THROW(model.batch.start(random_prompt(5, 1)), Error);
  EXPECT_THROW(model.batch.start({}), Error);
  const int64_t slot = model.batch.start(random_prompt(4, 1));
  EXPECT_THROW(model.batch.start(random_prompt(1, 1)), Error);
  EXPECT_THROW(model.batch.step(std::vector<int32_t>(1)), Error);
  model.batch.stop(slot);
  EXPECT_THROW(model.batch.stop(slot), Error);
  EXPECT_THROW(model.batch.start(random_prompt(3, 1), nullptr, /*reach=*/5), Error);
  EXPECT_THROW(model.batch.start(random_prompt(3, 1), nullptr, /*reach=*/2), Error);
  EXPECT_EQ(model.batch.start(random_prompt(2, 1), nullptr, /*reach=*/2), slot);
  EXPECT_THROW(model.batch.step(std::vector<int32_t>(1)), Error);
  model.batch.stop(slot);
  EXPECT_EQ(model.batch.start(random_prompt(4, 2)), slot);
}

}  // namespace
}  // namespace sbtrain::test
