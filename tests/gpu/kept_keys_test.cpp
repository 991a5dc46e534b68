// A cache that drops keys by their gates, on a GPU against the CPU.
#include "attention/kept_keys.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "config/schema.h"
#include "gpu/op_test.h"
#include "ops/kept_keys.h"
#include "serve/decode_batch.h"
#include "support/model.h"

namespace sbtrain::kept_keys_test {
namespace {

using test::OnGpu;
using test::Owned;
using KeptKeysOnGpu = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;
constexpr int64_t kSteps = 70;  // more than a page

struct Case {
  int64_t heads, key_heads, head_dim;
  std::vector<int64_t> prompts;  // tokens of each sequence
  int64_t capacity;
  AttentionShape shape() const {
    return {.width = heads * head_dim, .heads = heads, .kv_heads = key_heads, .head_dim = head_dim};
  }
};
const std::vector<Case> kCases = {{3, 3, 5, {1, 9, 64}, 200},       {8, 2, 64, {700, 1, 63}, 800},
                                  {4, 4, 128, {300, 1030}, 1101},   {2, 1, 200, {65, 2}, 140},
                                  {24, 24, 64, {1100, 40}, 1200},   {130, 130, 16, {600, 5}, 700},
                                  {8, 8, 64, {2500, 64, 65}, 2600}, {2, 2, 48, {500, 128}, 600}};

Owned gates(std::string_view name, int64_t tokens, int64_t heads) {
  const Philox random(2, RandomPurpose::kTest, name);
  return test::generated({tokens, heads}, 0, [&](int64_t i) {
    return 0.01 + 0.98 * random.uniform(static_cast<uint64_t>(i));
  });
}

// The same prompts and tokens on both backends, in both of two layers.
class Both {
 public:
  Both(test::GpuStream& gpu, test::CpuStream& cpu, const Case& c, float bound)
      : gpu_(gpu),
        cpu_(cpu),
        c_(c),
        batch_(static_cast<int64_t>(c.prompts.size())),
        on_gpu_(gpu.memory, c.shape(), 2, batch_, c.capacity, {.below = bound}),
        on_cpu_(cpu.memory, c.shape(), 2, batch_, c.capacity, {.below = bound}),
        all_(batch_) {
    std::iota(all_.begin(), all_.end(), 0);
    const int64_t width = c.shape().key_width();
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t tokens = c.prompts[static_cast<size_t>(b)];
      const Owned k = test::random_bf16("k" + std::to_string(b), {tokens, width});
      const Owned v = test::random_bf16("v" + std::to_string(b), {tokens, width});
      const Owned gate = gates("gate" + std::to_string(b), tokens, c.heads);
      const OnGpu gate_gpu(gpu, gate, kF32);
      for (const int64_t layer : {0, 1}) {
        on_cpu_.store(cpu, layer, b, k, v, gate);
        on_gpu_.store(gpu, layer, b, OnGpu(gpu, k, kBF16, 8), OnGpu(gpu, v, kBF16, 3), gate_gpu);
      }
    }
  }
  // Both outputs of a new token of each sequence, which sees the keys of the steps before.
  void step(int64_t n, const ops::StickBreakingParams& params) {
    const auto named = [&](const char* name) { return name + std::to_string(n); };
    const int64_t width = c_.shape().key_width();
    const Owned q = test::random_bf16(named("q"), {batch_, c_.shape().query_width()});
    const Owned k = test::random_bf16(named("new k"), {batch_, width});
    const Owned v = test::random_bf16(named("new v"), {batch_, width});
    const Owned gate = gates(named("new gate"), batch_, c_.heads);
    const Owned bias = test::random_bf16("bias", {c_.shape().query_width()});
    std::vector<int32_t> positions;
    for (const int64_t tokens : c_.prompts) positions.push_back(static_cast<int32_t>(tokens + n));
    const Owned positions_B = test::integers(positions);
    const Owned expected = test::poisoned({batch_, c_.shape().query_width()});
    const OnGpu o(gpu_, kBF16, {batch_, c_.shape().query_width()}, 1);
    EXPECT_TRUE(on_cpu_.make_room(cpu_, all_).empty());
    EXPECT_TRUE(on_gpu_.make_room(gpu_, all_).empty());
    const Owned lengths(kI32, {batch_, c_.key_heads});
    run(cpu_, on_cpu_, params, {expected, q, k, v, gate, bias, positions_B, lengths});
    run(gpu_, on_gpu_, params,
        {o, OnGpu(gpu_, q, kBF16), OnGpu(gpu_, k, kBF16), OnGpu(gpu_, v, kBF16, 8),
         OnGpu(gpu_, gate, kF32), OnGpu(gpu_, bias, kBF16), OnGpu(gpu_, positions_B, kI32),
         OnGpu(gpu_, kI32, {batch_, c_.key_heads})});
    on_cpu_.stepped(all_);
    on_gpu_.stepped(all_);
    EXPECT_LE(test::relative_error(o, expected), test::kBf16Error) << "step " << n;
    EXPECT_TRUE(o.gaps_intact());
  }
  void expect_same_counts() {
    on_cpu_.read_counts(cpu_, all_);
    on_gpu_.read_counts(gpu_, all_);
    EXPECT_EQ(on_cpu_.use().kept, on_gpu_.use().kept);
    EXPECT_EQ(on_cpu_.use().seen, on_gpu_.use().seen);
    kept_ = on_cpu_.use().kept;
  }
  int64_t kept() const { return kept_; }
  int64_t seen() const { return on_cpu_.use().seen; }

 private:
  struct Tensors {
    Tensor o, q, k, v, gate, bias, positions, lengths;
  };
  void run(Stream& s, const KeptKeys& keys, const ops::StickBreakingParams& params,
           const Tensors& x) const {
    for (const int64_t layer : {0, 1}) {
      const Tensor pages_BGM = keys.pages(layer, batch_);
      ops::run(s, ops::PlaceKeys{.counts_BG = keys.counts(layer, batch_),
                                 .lengths_BG = x.lengths,
                                 .pages_BGM = pages_BGM,
                                 .gate_BH = x.gate,
                                 .positions_B = x.positions,
                                 .bound = keys.bound(),
                                 .head_dim = static_cast<int>(c_.head_dim)});
      ops::run(s, ops::StickBreakingKeptDecode{.o_BHd = x.o,
                                               .q_BHd = x.q,
                                               .k_BGd = x.k,
                                               .v_BGd = x.v,
                                               .pages_BGM = pages_BGM,
                                               .remainder_bias_Hd = x.bias,
                                               .lengths_BG = x.lengths,
                                               .params = params});
    }
    ops::run(s, ops::Synchronize{});  // before the tensors of this step go
  }

  test::GpuStream& gpu_;
  test::CpuStream& cpu_;
  Case c_;
  int64_t batch_;
  KeptKeys on_gpu_, on_cpu_;
  std::vector<int64_t> all_;
  int64_t kept_ = 0;
};

TEST_F(KeptKeysOnGpu, MatchTheCpu) {
  for (const Case& c : kCases) {
    for (const float bound : {0.001f, 0.5f, 0.97f}) {
      SCOPED_TRACE(testing::Message() << c.heads << " heads of " << c.head_dim << ", " << bound);
      Both both(gpu(), cpu, c, bound);
      both.expect_same_counts();
      for (int64_t n = 0; n < kSteps; ++n) {
        const auto remainder = static_cast<ops::Remainder>(n % 3);
        both.step(n, {.heads = static_cast<int>(c.heads),
                      .scale = 0.1f,
                      .attend_current = n % 2 == 1,
                      .remainder = remainder});
      }
      both.expect_same_counts();
      EXPECT_EQ(both.kept() == both.seen(), bound < 0.01f);
    }
  }
}

ModelConfig gated_config(int64_t heads, int64_t kv_heads) {
  ModelConfig config;
  config.layers = 2;
  config.width = 128;
  config.inner = 192;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.vocab = 300;
  config.init_std = 0.2;
  config.attention = {
      parse_attention("{type: stickbreaking, forget_gate: true, head_norm: true}"),
      parse_attention("{type: stickbreaking, forget_gate: true, remainder: value}")};
  return config;
}

// Where nothing is dropped, logits have the bits of another cache; and whatever is dropped, those
// of a sequence do not depend on the others, nor on whether steps run by records.
TEST_F(KeptKeysOnGpu, ContinueSequencesOfAModel) {
  using Logits = std::vector<std::vector<float>>;
  for (const int64_t kv_heads : {4, 2}) {
    const ModelConfig config = gated_config(4, kv_heads);
    test::ModelRun run(Backend::kCuda, config, test::packed_batch({20}, config.vocab));
    const auto prompt = [&](int64_t n) {
      return test::packed_batch({static_cast<int32_t>(1 + 257 * n % 900)}, config.vocab,
                                static_cast<uint64_t>(n))
          .tokens;
    };
    const auto continued = [&](DecodeBatch& batch, const std::vector<int64_t>& slots) {
      std::vector<Logits> logits(slots.size());
      for (int64_t i = 0; i <= kSteps; ++i) {
        std::vector<int32_t> next(static_cast<size_t>(batch.slots()));
        for (size_t n = 0; n < slots.size(); ++n) {
          const auto row = batch.logits(slots[n]);
          logits[n].emplace_back(row.begin(), row.end());
          next[static_cast<size_t>(slots[n])] = batch.likeliest(slots[n]);
        }
        batch.step(next);
      }
      return logits;
    };
    const auto alone = [&](int64_t n, const DecodeOptions& options) {
      DecodeBatch batch(run.model(), run.params(), run.stream(), 1, 1100, options);
      const int64_t slot = batch.start(prompt(n));
      return continued(batch, {slot}).front();
    };
    for (const double below : {1e-30, 0.95, 0.985}) {
      const KeyDropping dropping = {.below = below};
      DecodeBatch batch(run.model(), run.params(), run.stream(), 5, 1100, {.dropping = dropping});
      std::vector<int64_t> slots;
      for (int64_t n = 0; n < 5; ++n) slots.push_back(batch.start(prompt(n)));
      batch.stop(slots[1]);  // an idle row
      slots.erase(slots.begin() + 1);
      const std::vector<Logits> logits = continued(batch, slots);
      const CacheUse use = batch.cache_use(/*now=*/true);
      EXPECT_EQ(use.kept == use.seen, below < 0.01) << use.kept << " of " << use.seen;
      for (const int64_t n : {0, 2, 4}) {
        const auto& mine = logits[static_cast<size_t>(n > 0 ? n - 1 : 0)];
        EXPECT_EQ(mine, alone(n, {.recorded = false, .dropping = dropping})) << below << " " << n;
        EXPECT_EQ(mine, alone(n, {.dropping = dropping})) << below << " " << n;
        if (below > 0.01) continue;
        EXPECT_EQ(mine, alone(n, {})) << n;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::kept_keys_test
