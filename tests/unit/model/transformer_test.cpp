#include "model/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "config/schema.h"
#include "core/philox.h"
#include "model/inference/decode.h"
#include "model/inference/prefill.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"
#include "serve/generate.h"
#include "support/tensors.h"
#include "train/plan.h"

namespace sbtrain {
namespace {

ModelConfig shape(int64_t layers, int64_t width, int64_t inner, int64_t heads, int64_t vocab,
                  bool tied) {
  ModelConfig config;
  config.layers = layers;
  config.width = width;
  config.inner = inner;
  config.heads = heads;
  config.vocab = vocab;
  config.tied = tied;
  return config;
}

TEST(Transformer, ParameterCountsOfThePapersModels) {
  EXPECT_EQ(Transformer(shape(24, 1024, 2730, 32, 32000, false)).registry().count(), 367'526'912);
  EXPECT_EQ(Transformer(shape(40, 1536, 4096, 24, 49152, true)).registry().count(), 1'208'083'968);
  EXPECT_EQ(Transformer(shape(40, 2304, 9216, 36, 50304, true)).registry().count(), 3'513'473'280);
}

// The models of the ReBased paper (arXiv 2402.10644).
ModelConfig gpt(int64_t layers, int64_t width, int64_t heads, int64_t vocab, int64_t positions) {
  ModelConfig config = shape(layers, width, 4 * width, heads, vocab, true);
  config.norm = NormKind::kLayerNorm;
  config.mlp = MlpKind::kGelu;
  config.position = PositionEmbedding::kLearned;
  config.max_positions = positions;
  return config;
}

int64_t count(ModelConfig config, const std::vector<std::string>& types) {
  config.attention.clear();
  for (const std::string& type : types) config.attention.push_back({.type = type});
  return Transformer(config).registry().count();
}

// Table 4 of the ReBased paper: two layers without MLP, as configs/ has them at width 64. Attention
// has two layers of attention with biases and 1024 positions, the others a short convolution in the
// first layer; that of ConvAttention has 512 positions at width 64 and 128 at the others, Based and
// ReBased have 256, and 12 heads whose values leave the rest of the width unused.
TEST(Transformer, ParameterCountsOfTheAssociativeRecallModels) {
  const auto count_of = [](const char* name, int64_t width, int64_t positions) {
    const std::filesystem::path configs = SBTRAIN_SOURCE "/configs";
    ModelConfig model = load_config(configs / (std::string(name) + ".yaml")).model;
    if (width == 64) {
      EXPECT_TRUE(model.width == 64 && model.max_positions == positions) << name;
    }
    model.width = width;
    model.max_positions = positions;
    return Transformer(model).registry().count();
  };
  struct Row {
    int64_t width, attention, conv_attention, conv_positions, based;
  };
  for (const Row& row :
       {Row{64, 623'744, 578'752, 512, 577'984}, Row{128, 1'313'024, 1'149'312, 128, 1'179'520},
        Row{256, 2'888'192, 2'462'464, 128, 2'459'392},
        Row{512, 6'824'960, 5'580'288, 128, 5'307'904}}) {
    EXPECT_EQ(count_of("mqar_softmax", row.width, 1024), row.attention);
    EXPECT_EQ(count_of("mqar_attention", row.width, row.conv_positions), row.conv_attention);
    EXPECT_EQ(count_of("mqar_based", row.width, 256), row.based);
    EXPECT_EQ(count_of("mqar_rebased", row.width, 256), row.based + 768);
  }
}

// Keys and values have kv_heads of the heads, q, k and v biases, and the norms one head each.
TEST(Transformer, ParameterCountsOfModelsToImport) {
  // Llama 3.2 1B, Qwen2.5 0.5B and a Qwen3 whose heads fill the width, as transformers counts them.
  ModelConfig llama = shape(16, 2048, 8192, 32, 128256, true);
  llama.kv_heads = 8;
  llama.attention = {parse_attention("{type: softmax}")};
  EXPECT_EQ(Transformer(llama).registry().count(), 1'235'814'400);
  ModelConfig qwen2 = shape(24, 896, 4864, 14, 151936, true);
  qwen2.kv_heads = 2;
  qwen2.attention = {parse_attention("{type: softmax, qkv_bias: true}")};
  EXPECT_EQ(Transformer(qwen2).registry().count(), 494'032'768);
  ModelConfig qwen3 = shape(28, 2048, 6144, 16, 151936, true);
  qwen3.kv_heads = 8;
  qwen3.attention = {parse_attention("{type: softmax, qk_norm: true}")};
  EXPECT_EQ(Transformer(qwen3).registry().count(), 1'720'574'976);
}

// As transformers counts them: GPT-2, Pythia 160M and OLMo 2 1B.
TEST(Transformer, ParameterCountsOfOlderAndOtherLayouts) {
  ModelConfig gpt2 = gpt(12, 768, 12, 50257, 1024);
  gpt2.mlp = MlpKind::kGeluTanh;
  gpt2.attention = {
      parse_attention("{type: softmax, position: none, qkv_bias: true, output_bias: true}")};
  EXPECT_EQ(Transformer(gpt2).registry().count(), 124'439'808);
  ModelConfig pythia = shape(12, 768, 3072, 12, 50304, false);
  pythia.norm = NormKind::kLayerNorm;
  pythia.mlp = MlpKind::kGelu;
  pythia.parallel_residual = true;
  pythia.attention = {
      parse_attention("{type: softmax, rope_fraction: 0.25, qkv_bias: true, output_bias: true}")};
  EXPECT_EQ(Transformer(pythia).registry().count(), 162'322'944);
  ModelConfig olmo2 = shape(16, 2048, 8192, 16, 100352, false);
  olmo2.norm_position = NormPosition::kOutput;
  olmo2.attention = {parse_attention("{type: softmax, qk_norm: true, qk_norm_scope: joint}")};
  EXPECT_EQ(Transformer(olmo2).registry().count(), 1'484'916'736);
}

TEST(Transformer, ParameterCountsOfThePileModels) {
  EXPECT_EQ(count(gpt(18, 768, 64, 50304, 4096), {"short_conv", "based"}), 156'955'392);
  EXPECT_EQ(count(gpt(18, 768, 64, 50304, 4096), {"short_conv", "rebased"}), 156'992'256);
  ModelConfig attention = gpt(12, 768, 12, 50304, 4096);
  attention.attention = {parse_attention("{type: softmax, position: none}")};
  attention.attention[0].output_bias = true;
  EXPECT_EQ(Transformer(attention).registry().count(), 126'807'552);
}

// 66 + 33 H for each layer: c, m, and an MLP of 32 hidden units.
TEST(Transformer, ParameterCountOfFire) {
  ModelConfig config = shape(3, 48, 64, 6, 100, true);
  config.attention = {parse_attention("{type: softmax, position: none}")};
  const int64_t none = Transformer(config).registry().count();
  config.attention = {parse_attention("{type: softmax, position: fire}")};
  EXPECT_EQ(Transformer(config).registry().count(), none + 3 * (66 + 33 * 6));
  config.attention = {parse_attention("{type: softmax, position: fire, shared: true}")};
  EXPECT_EQ(Transformer(config).registry().count(), none + 66 + 33 * 6);
  // Every second layer has a network of its own.
  config.attention.push_back(parse_attention("{type: softmax, position: fire}"));
  EXPECT_EQ(Transformer(config).registry().count(), none + 2 * (66 + 33 * 6));
}

// 6 N and 6 layers D L for the causal half.
TEST(Transformer, FlopsPerToken) {
  const Transformer model(shape(40, 1536, 4096, 24, 49152, true));
  EXPECT_DOUBLE_EQ(model.flops_per_token(2048), 6.0 * 1'208'083'968 + 6.0 * 40 * 1536 * 4096);
  EXPECT_DOUBLE_EQ(model.flops_per_token(4096), 6.0 * 1'208'083'968 + 12.0 * 40 * 1536 * 4096);
  // 6 V D of a token without a target are not computed.
  EXPECT_DOUBLE_EQ(
      model.flops_per_token(2048, 0.25),
      model.flops_per_token(2048) - 0.75 * 6 * static_cast<double>(model.config().vocab) * 1536);
}

// A model with its parameters and one micro-batch of packed documents.
class Harness {
 public:
  Harness(ModelConfig config, Recompute recompute, std::vector<int32_t> lengths)
      : model_(config, recompute),
        communicator_(make_single_process()),
        mesh_(*communicator_),
        params_(model_.registry(), cpu_.stream, mesh_, make_optimizer()),
        tokens_(total(lengths)) {
    params_.initialize(5);
    std::vector<int32_t> tokens, targets, positions, boundaries = {0};
    const Philox random(2, RandomPurpose::kTest, "tokens");
    for (const int32_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) {
        tokens.push_back(static_cast<int32_t>(random.bits(tokens.size()) % config.vocab));
        targets.push_back(
            i + 1 < length ? static_cast<int32_t>(random.bits(tokens.size()) % config.vocab) : -1);
        positions.push_back(i);
      }
      boundaries.push_back(boundaries.back() + length);
    }
    valid_ = tokens_ - static_cast<int64_t>(lengths.size());
    ints_.push_back(test::integers(tokens));
    ints_.push_back(test::integers(targets));
    ints_.push_back(test::integers(positions));
    ints_.push_back(test::integers(boundaries));
    batch_ = {.tokens_T = ints_[0],
              .targets_T = ints_[1],
              .sequences = {.cu_seqlens = ints_[3],
                            .positions_T = ints_[2],
                            .count = static_cast<int64_t>(lengths.size()),
                            .max_seqlen = *std::max_element(lengths.begin(), lengths.end())}};
  }

  // The objective: mean loss plus z-loss, from a forward pass with backward.
  void backward(float z_loss = 0.0f) {
    test::Owned loss = test::poisoned({tokens_});
    model_.forward_backward(cpu_, params_, batch_, loss, 1.0f / static_cast<float>(valid_), z_loss);
  }
  double mean_loss() {
    test::Owned loss = test::poisoned({tokens_});
    model_.evaluate(cpu_, params_, batch_, loss);
    return ops::sum(cpu_, loss) / static_cast<double>(valid_);
  }
  std::vector<float> gradients() {
    std::vector<float> all;
    for (size_t u = 0; u < model_.registry().units().size(); ++u) {
      const auto& shard = params_.shard(static_cast<int>(u));
      all.insert(all.end(), shard.gradient.f32(), shard.gradient.f32() + shard.size);
    }
    return all;
  }

  const Transformer& model() const { return model_; }
  ShardedParams& params() { return params_; }
  Stream& stream() { return cpu_.stream; }
  const BatchTensors& batch() const { return batch_; }

 private:
  static int64_t total(const std::vector<int32_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  }
  test::CpuStream cpu_;
  Transformer model_;
  std::unique_ptr<Communicator> communicator_;
  Mesh mesh_;
  ShardedParams params_;
  int64_t tokens_;
  int64_t valid_ = 0;
  std::vector<test::Owned> ints_;
  BatchTensors batch_;
};

ModelConfig small(const AttentionConfig& attention, bool tied = true) {
  ModelConfig config = shape(2, 32, 44, 2, 61, tied);  // 44 is not a multiple of 8: stored padded
  config.init_std = 0.2;
  config.attention = {attention};
  return config;
}

struct Case {
  std::string name;
  AttentionConfig attention{};
  std::function<void(ModelConfig&)> change = [](ModelConfig&) {};
  double step = 2e-2;  // of differences; shorter for functions with kinks or strong curvature
};

ModelConfig small(const Case& c, bool tied = true) {
  ModelConfig config = small(c.attention, tied);
  c.change(config);
  return config;
}

// The GPT-2 layout with learned positions.
void make_gpt(ModelConfig& config) {
  config.norm = NormKind::kLayerNorm;
  config.mlp = MlpKind::kGelu;
  config.position = PositionEmbedding::kLearned;
  config.max_positions = 64;
}

// Two kinds of layers, no MLP, and heads that do not divide the width.
void make_hybrid(ModelConfig& config) {
  make_gpt(config);
  config.mlp = MlpKind::kNone;
  config.heads = 5;
  config.attention = {parse_attention("{type: short_conv}"),
                      parse_attention("{type: rebased, feature_dim: 4}")};
}

// OLMo 2: norms at the outputs.
void make_olmo2(ModelConfig& config) {
  config.norm_position = NormPosition::kOutput;
}

// GPT-NeoX: the MLP beside attention.
void make_neox(ModelConfig& config) {
  config.norm = NormKind::kLayerNorm;
  config.mlp = MlpKind::kGelu;
  config.parallel_residual = true;
}

void make_parallel(ModelConfig& config) {
  config.parallel_residual = true;
}

// Layouts that no family has, of layers with and without an output projection.
void make_parallel_hybrid(ModelConfig& config) {
  make_hybrid(config);
  config.parallel_residual = true;
}
void make_olmo2_hybrid(ModelConfig& config) {
  make_hybrid(config);
  config.norm_position = NormPosition::kOutput;
}
void make_parallel_outputs(ModelConfig& config) {
  make_gpt(config);
  config.mlp = MlpKind::kGeluTanh;
  config.norm_position = NormPosition::kOutput;
  config.parallel_residual = true;
}
void make_parallel_outputs_hybrid(ModelConfig& config) {
  make_parallel_hybrid(config);
  config.norm_position = NormPosition::kOutput;
}

std::vector<Case> cases() {
  const AttentionConfig plain;
  const auto rich = parse_attention("{remainder: bias, head_norm: true, forget_gate: true}");
  const auto value = parse_attention("{remainder: value, attend_current: true}");
  const auto rope = parse_attention("{type: softmax}");
  const auto nope = parse_attention("{type: softmax, position: none}");
  const auto fire = parse_attention("{type: softmax, position: fire}");
  const auto fire_shared = parse_attention("{type: softmax, position: fire, shared: true}");
  const auto alibi = parse_attention("{type: softmax, position: alibi, window: 9}");
  const auto based = parse_attention("{type: based, feature_dim: 4, output_bias: true}");
  const auto biased = parse_attention("{type: softmax, position: none, output_bias: true}");
  const auto coca = parse_attention("{type: coca}");
  const auto joint = parse_attention("{type: softmax, qk_norm: true, qk_norm_scope: joint}");
  const auto partly =
      parse_attention("{type: softmax, rope_fraction: 0.25, qkv_bias: true, output_bias: true}");
  return {{"fire", fire},
          {"fire_shared", fire_shared},
          {"alibi_window", alibi},
          {"coca", coca, [](ModelConfig&) {}, 5e-4},
          {"based_bias", based},
          {"gpt", biased, make_gpt},
          {"gpt_stickbreaking", plain, make_gpt},
          {"hybrid", {}, make_hybrid, 1e-3},
          {"gpt_tanh", biased,
           [](ModelConfig& config) {
             make_gpt(config);
             config.mlp = MlpKind::kGeluTanh;
           }},
          {"olmo2", joint, make_olmo2, 5e-3},
          {"olmo2_stickbreaking", rich, make_olmo2},
          {"olmo2_hybrid", {}, make_olmo2_hybrid, 1e-3},
          {"neox", partly, make_neox},
          {"parallel", rope, make_parallel},
          {"parallel_stickbreaking", value, make_parallel},
          {"parallel_hybrid", {}, make_parallel_hybrid, 1e-3},
          {"parallel_outputs", biased, make_parallel_outputs},
          {"parallel_outputs_hybrid", {}, make_parallel_outputs_hybrid, 1e-3},
          {"stickbreaking", plain},
          {"bias_norm_gate", rich},
          {"value_current", value},
          {"rope", rope},
          {"nope", nope}};
}

class TransformerAttention : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, TransformerAttention, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Along a random direction in each tensor the loss changes as its gradient predicts.
TEST_P(TransformerAttention, GradientsAgreeWithFiniteDifferences) {
  for (const bool tied : {true, false}) {
    Harness h(small(GetParam(), tied), Recompute::kNone, {17, 1, 30, 2});
    // Moves parameters away from special initial values: norms at 1, biases at 0.
    for (size_t u = 0; u < h.model().registry().units().size(); ++u) {
      const ParamUnit& unit = h.model().registry().units()[u];
      for (const PlacedTensor& tensor : unit.tensors) {
        const Philox random(9, RandomPurpose::kTest, tensor.name);
        float* w = h.params().shard(static_cast<int>(u)).weights.f32() + tensor.offset;
        for_each_run(tensor, 0, tensor.stored, [&](const ElementRun& run) {
          for (int64_t i = 0; i < run.count; ++i) {
            w[run.storage + i] += static_cast<float>(0.1 * random.normal(run.logical + i));
          }
        });
      }
    }
    h.backward();
    for (size_t u = 0; u < h.model().registry().units().size(); ++u) {
      const ParamUnit& unit = h.model().registry().units()[u];
      const auto& shard = h.params().shard(static_cast<int>(u));
      for (const PlacedTensor& tensor : unit.tensors) {
        // Steps this long cross the kinks of FIRE's units; the attention tests use shorter ones.
        if (tensor.name.find(".fire.") != std::string::npos) continue;
        const Philox random(11, RandomPurpose::kTest, tensor.name);
        float* w = shard.weights.f32() + tensor.offset;
        const float* g = shard.gradient.f32() + tensor.offset;
        const std::vector<float> original(w, w + tensor.stored);
        // The direction follows the gradient, with some noise, so that the difference is large
        // against fp32 rounding.
        double norm = 0;
        for (int64_t i = 0; i < tensor.stored; ++i) norm += static_cast<double>(g[i]) * g[i];
        norm = std::sqrt(norm);
        ASSERT_GT(norm, 0) << tensor.name;
        std::vector<double> direction(tensor.stored, 0.0);
        double slope = 0;
        for_each_run(tensor, 0, tensor.stored, [&](const ElementRun& run) {
          for (int64_t i = 0; i < run.count; ++i) {
            const int64_t at = run.storage + i;
            direction[at] = g[at] / norm + 0.5 * random.normal(run.logical + i) /
                                               std::sqrt(static_cast<double>(tensor.count));
            slope += direction[at] * g[at];
          }
        });
        const double h_step = GetParam().step;
        const auto loss_at = [&](double t) {
          for (int64_t i = 0; i < tensor.stored; ++i) {
            w[i] = static_cast<float>(original[i] + t * direction[i]);
          }
          return h.mean_loss();
        };
        // Fourth-order central difference.
        const double numeric = (8 * (loss_at(h_step) - loss_at(-h_step)) -
                                (loss_at(2 * h_step) - loss_at(-2 * h_step))) /
                               (12 * h_step);
        std::copy(original.begin(), original.end(), w);
        EXPECT_NEAR(numeric, slope, 2e-3 * std::abs(slope) + 4e-8 / h_step) << tensor.name;
      }
    }
  }
}

// Recomputation repeats the same computation, so gradients are equal bit for bit.
TEST_P(TransformerAttention, RecomputePoliciesGiveTheSameGradients) {
  Harness none(small(GetParam()), Recompute::kNone, {40, 3, 21});
  Harness selective(small(GetParam()), Recompute::kSelective, {40, 3, 21});
  Harness full(small(GetParam()), Recompute::kFull, {40, 3, 21});
  none.backward(1e-3f);
  selective.backward(1e-3f);
  full.backward(1e-3f);
  EXPECT_EQ(none.gradients(), selective.gradients());
  EXPECT_EQ(none.gradients(), full.gradients());
}

// Prefill of any prefix and single steps after it give the logits of one full forward pass.
TEST_P(TransformerAttention, DecodeEqualsFullForward) {
  ModelConfig config = small(GetParam());
  const int32_t T = 24;
  Harness h(config, Recompute::kNone, {T});
  test::Owned expected = test::poisoned({T, config.vocab});
  h.model().logits(h.stream(), h.params(), h.batch(), expected);
  for (const int32_t prompt : {1, 7, 23}) {
    DecodeCache cache(h.stream().memory(), h.model(), 1, T);
    test::Owned boundaries = test::integers({0, prompt});
    BatchTensors batch = h.batch();
    batch.tokens_T = batch.tokens_T.row_range(0, prompt);
    batch.sequences = {.cu_seqlens = boundaries,
                       .positions_T = h.batch().sequences.positions_T.row_range(0, prompt),
                       .count = 1,
                       .max_seqlen = prompt};
    test::Owned logits = test::poisoned({1, config.vocab});
    prefill(h.stream(), h.model(), h.params(), batch, cache, 0, logits);
    for (int32_t t = prompt; t <= T; ++t) {
      EXPECT_LT(test::relative_error(logits, test::to_f64(expected.tensor().row_range(t - 1, 1))),
                1e-5)
          << "prompt " << prompt << ", token " << t - 1;
      if (t == T) break;
      test::Owned token = test::integers({h.batch().tokens_T.i32()[t]});
      test::Owned position = test::integers({t});
      test::Owned length = test::integers({t + 1});
      decode(h.stream(), h.model(), h.params(), token, cache,
             {.positions_B = position, .lengths_B = length, .norm = {}}, logits);
    }
  }
}

class TransformerMlp : public testing::TestWithParam<MlpKind> {};
INSTANTIATE_TEST_SUITE_P(All, TransformerMlp,
                         testing::Values(MlpKind::kSwiGlu, MlpKind::kGelu, MlpKind::kGeluTanh));

TEST_P(TransformerMlp, PaddedColumnsStayZeroInTheGradient) {
  ModelConfig config = small(AttentionConfig{});
  config.mlp = GetParam();
  Harness h(config, Recompute::kNone, {33});
  h.backward();
  const ParamUnit& unit = h.model().registry().unit(1);
  const float* gradient = h.params().shard(1).gradient.f32();
  for (const PlacedTensor& tensor : unit.tensors) {
    std::vector<bool> logical(tensor.stored, false);
    for_each_run(tensor, 0, tensor.stored, [&](const ElementRun& run) {
      for (int64_t i = 0; i < run.count; ++i) logical[run.storage + i] = true;
    });
    for (int64_t i = 0; i < tensor.stored; ++i) {
      if (!logical[i]) {
        ASSERT_EQ(gradient[tensor.offset + i], 0.0f) << tensor.name;
      }
    }
  }
}

Config run_config(Recompute recompute) {
  Config config;
  config.model = small(AttentionConfig{});
  config.train.sequence_length = 32;
  config.train.micro_batch = 2;
  config.train.batch = 2;
  config.train.recompute = recompute;
  return config;
}

TEST(MemoryPlan, RecomputingNeedsLess) {
  const size_t none = plan_memory(run_config(Recompute::kNone), Backend::kCpu).pool_bytes;
  const size_t selective = plan_memory(run_config(Recompute::kSelective), Backend::kCpu).pool_bytes;
  const size_t full = plan_memory(run_config(Recompute::kFull), Backend::kCpu).pool_bytes;
  EXPECT_LT(selective, none);
  EXPECT_LT(full, selective);
}

TEST(MemoryPlan, PersistentBytesAreFourCopiesOfTheStorage) {
  const Config config = run_config(Recompute::kNone);
  const MemoryReport report = plan_memory(config, Backend::kCpu);
  const size_t storage = static_cast<size_t>(Transformer(config.model).registry().storage()) * 4;
  EXPECT_EQ(report.persistent[static_cast<int>(MemoryClass::kWeights)], storage);
  EXPECT_EQ(report.persistent[static_cast<int>(MemoryClass::kGradients)], storage);
  EXPECT_EQ(report.persistent[static_cast<int>(MemoryClass::kOptimizer)], 2 * storage);
}

TEST(Sampling, GreedyTopKTopPAndSeed) {
  const std::vector<float> logits = {0.0f, 3.0f, 1.0f, 2.0f};
  EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0), 1);
  EXPECT_EQ(sample_token(logits, {.temperature = 5, .top_k = 1}, 0), 1);
  EXPECT_EQ(sample_token(logits, {.temperature = 1, .top_p = 0.1}, 3), 1);
  std::vector<int> counts(4);
  const SamplingOptions two = {.temperature = 1, .top_k = 2, .top_p = 1, .seed = 4};
  const int draws = 4000;
  for (int i = 0; i < draws; ++i) ++counts[sample_token(logits, two, i)];
  EXPECT_EQ(counts[0] + counts[2], 0);
  const double expected = 1 / (1 + std::exp(-1.0));
  EXPECT_NEAR(static_cast<double>(counts[1]) / draws, expected, 4 * 0.5 / std::sqrt(draws));
  EXPECT_EQ(sample_token(logits, two, 17), sample_token(logits, two, 17));
}

}  // namespace
}  // namespace sbtrain
