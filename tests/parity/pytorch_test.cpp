// Loss, logits and gradients of a 2-layer model against PyTorch's autograd in fp32. Skipped if
// no Python with torch and numpy is found. The build makes two programs from this file, one for
// each backend.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "config/schema.h"
#include "core/device.h"
#include "support/model.h"
#include "support/process.h"

namespace sbtrain {
namespace {

constexpr int kNoTorch = 77;  // exit code of pytorch_reference.py without torch

constexpr Backend kBackend = Backend::SBTRAIN_PARITY_BACKEND;

// Bounds of relative errors: fp32 on the CPU, bf16 on the GPU, where the error of a tensor may
// also be 1.5 times that of PyTorch with tensors stored in bf16.
struct Tolerance {
  const char* loss;
  const char* tensors;
};
constexpr Tolerance kTolerance =
    kBackend == Backend::kCuda ? Tolerance{"5e-3", "8e-3"} : Tolerance{"1e-4", "1e-4"};

struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

void write_tensors(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  for (const NamedTensor& t : tensors) {
    entries.push_back({.name = t.name, .dtype = FileDType::kF32, .shape = t.shape});
  }
  const Storage storage;
  SafetensorsWriter writer(storage, path, entries, {});
  for (const SafetensorsEntry& entry : writer.entries()) {
    for (const NamedTensor& t : tensors) {
      if (t.name == entry.name) writer.write(t.name, 0, t.values.data(), t.values.size() * 4);
    }
  }
  writer.finish();
}

std::vector<NamedTensor> named(const ParamRegistry& registry,
                               const std::map<std::string, std::vector<float>>& values) {
  std::vector<NamedTensor> out;
  for (const ParamUnit& unit : registry.units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      out.push_back({tensor.name, tensor.spec.shape, values.at(tensor.name)});
    }
  }
  return out;
}

nlohmann::json model_json(const ModelConfig& m) {
  nlohmann::json attention = nlohmann::json::array();
  for (const AttentionConfig& a : m.attention) {
    nlohmann::json options;
    for (const auto& [key, text] : flatten(a)) {
      const nlohmann::json value = nlohmann::json::parse(text, nullptr, false);
      options[key] = value.is_discarded() ? nlohmann::json(text) : value;
    }
    attention.push_back(options);
  }
  return {{"layers", m.layers},
          {"width", m.width},
          {"heads", m.heads},
          {"kv_heads", m.kv_heads},
          {"head_dim", m.head_dim},
          {"tied", m.tied},
          {"norm_eps", m.norm_eps},
          {"norm", name_of(m.norm)},
          {"norm_position", name_of(m.norm_position)},
          {"mlp", name_of(m.mlp)},
          {"parallel_residual", m.parallel_residual},
          {"position", name_of(m.position)},
          {"embedding_multiplier", m.embedding_multiplier},
          {"residual_multiplier", m.residual_multiplier},
          {"logits_multiplier", m.logits_multiplier},
          {"attention", attention}};
}

struct Case {
  std::string name;
  ModelConfig model;
};

ModelConfig base() {
  ModelConfig m;
  m.layers = 2;
  m.width = 64;
  m.inner = 90;
  m.heads = 2;
  m.vocab = 211;
  m.init_std = 0.15;
  return m;
}

std::vector<Case> cases() {
  ModelConfig plain = base();
  ModelConfig rich = base();
  rich.tied = false;
  rich.attention = {parse_attention("{head_norm: true, forget_gate: true, remainder: bias}")};
  ModelConfig value = base();
  value.attention = {parse_attention("{remainder: value, attend_current: true}")};
  value.embedding_multiplier = 3;
  value.residual_multiplier = 0.5;
  value.logits_multiplier = 0.25;
  ModelConfig rope = base();
  rope.attention = {parse_attention("{type: softmax}")};
  ModelConfig mixed = base();
  mixed.attention.push_back(parse_attention("{type: softmax, position: none}"));
  ModelConfig biases = base();
  biases.heads = 4;
  biases.attention = {parse_attention("{type: softmax, position: alibi}"),
                      parse_attention("{type: softmax, position: fire, window: 50}")};
  ModelConfig shared = biases;
  shared.layers = 4;
  shared.attention = {parse_attention("{type: softmax, position: fire, shared: true}"),
                      parse_attention("{type: softmax, position: fire, shared: true, window: 50}"),
                      parse_attention("{type: softmax, position: fire}")};
  ModelConfig stretched = base();
  stretched.layers = 3;
  stretched.attention = {
      parse_attention("{type: softmax, rope_scaling: linear, rope_factor: 2}"),
      parse_attention("{type: softmax, rope_scaling: ntk, rope_factor: 2}"),
      parse_attention("{type: softmax, rope_scaling: dynamic_ntk, rope_factor: 2, "
                      "rope_train_length: 40}")};
  ModelConfig low_frequencies = base();
  low_frequencies.layers = 3;
  low_frequencies.attention = {
      parse_attention("{type: softmax, rope_scaling: llama3, rope_factor: 8, rope_base: 500000, "
                      "rope_train_length: 100}"),
      parse_attention("{type: softmax, rope_scaling: yarn, rope_factor: 4, rope_train_length: 40, "
                      "rope_beta_fast: 3}"),
      parse_attention("{type: coca, rope_scaling: yarn, rope_factor: 4, rope_train_length: 40, "
                      "rope_attention_factor: 0.8}")};
  ModelConfig narrow_heads = base();
  narrow_heads.heads = 4;
  narrow_heads.kv_heads = 2;
  narrow_heads.head_dim = 8;  // 32 channels in a model of 64
  narrow_heads.layers = 4;
  narrow_heads.attention = {
      parse_attention("{head_norm: true, remainder: bias, forget_gate: true, qk_norm: true}"),
      parse_attention("{type: softmax, qk_norm: true, output_bias: true}"),
      parse_attention("{type: coca}"), parse_attention("{type: softmax, position: fire}")};
  ModelConfig broad_heads = narrow_heads;
  broad_heads.head_dim = 40;  // 160 channels
  ModelConfig coca = base();
  coca.attention = {parse_attention("{type: coca}"),
                    parse_attention("{type: coca, variant: strict}")};
  ModelConfig gpt = base();
  gpt.norm = NormKind::kLayerNorm;
  gpt.mlp = MlpKind::kGelu;
  gpt.position = PositionEmbedding::kLearned;
  gpt.max_positions = 200;
  gpt.attention = {parse_attention("{type: softmax, position: none, output_bias: true}")};
  ModelConfig gpt2 = gpt;
  gpt2.mlp = MlpKind::kGeluTanh;  // no biases of keys: without rotation softmax ignores them
  ModelConfig neox = base();
  neox.norm = NormKind::kLayerNorm;
  neox.mlp = MlpKind::kGelu;
  neox.parallel_residual = true;
  neox.attention = {parse_attention("{type: softmax, rope_fraction: 0.25, qkv_bias: true, "
                                    "output_bias: true}"),
                    parse_attention("{type: softmax, rope_fraction: 0.5, rope_scaling: "
                                    "dynamic_ntk, rope_factor: 2, rope_train_length: 40}")};
  ModelConfig olmo2 = base();
  olmo2.heads = 4;
  olmo2.kv_heads = 2;
  olmo2.layers = 3;
  olmo2.norm_position = NormPosition::kOutput;
  olmo2.attention = {
      parse_attention("{type: softmax, qk_norm: true, qk_norm_scope: joint}"),
      parse_attention("{qk_norm: true, qk_norm_scope: joint, head_norm: true}"),
      parse_attention("{type: coca, qk_norm: true, qk_norm_scope: joint, output_bias: true}")};
  ModelConfig parallel = base();
  parallel.norm = NormKind::kLayerNorm;
  parallel.norm_position = NormPosition::kOutput;
  parallel.parallel_residual = true;
  parallel.attention = {parse_attention("{type: short_conv}"), parse_attention("{}")};
  ModelConfig based = gpt;
  based.attention = {parse_attention("{type: short_conv}"), parse_attention("{type: based}")};
  ModelConfig rebased = based;
  rebased.mlp = MlpKind::kNone;
  rebased.heads = 12;  // 5 values for each head, 60 in all
  rebased.attention[1] = parse_attention("{type: rebased}");
  ModelConfig grouped = base();
  grouped.layers = 3;
  grouped.heads = 8;
  grouped.kv_heads = 2;
  grouped.attention = {parse_attention("{qk_norm: true, qkv_bias: true}"),
                       parse_attention("{type: softmax, qk_norm: true, qkv_bias: true}"),
                       parse_attention("{type: coca, qk_norm: true, qkv_bias: true}")};
  ModelConfig one_key_head = base();
  one_key_head.heads = 4;
  one_key_head.kv_heads = 1;
  one_key_head.attention = {parse_attention("{remainder: value, forget_gate: true}"),
                            parse_attention("{type: softmax, position: alibi, window: 50}")};
  ModelConfig wide = base();
  wide.width = 256;
  wide.heads = 1;
  wide.init_std = 0.075;  // products as large as those of the other models
  wide.layers = 4;
  wide.attention = {parse_attention("{remainder: value, forget_gate: true}"),
                    parse_attention("{type: softmax}"),
                    parse_attention("{type: softmax, position: fire}"),
                    parse_attention("{type: softmax, position: alibi}")};
  return {{"stickbreaking", plain},
          {"bias_norm_gate", rich},
          {"value_current_multipliers", value},
          {"rope", rope},
          {"rope_scaling", stretched},
          {"rope_low_frequencies", low_frequencies},
          {"narrow_heads", narrow_heads},
          {"broad_heads", broad_heads},
          {"mixed_layers", mixed},
          {"alibi_and_fire", biases},
          {"shared_fire", shared},
          {"coca", coca},
          {"grouped_norm_bias", grouped},
          {"one_key_head", one_key_head},
          {"wide_heads", wide},
          {"gpt", gpt},
          {"gpt2", gpt2},
          {"gpt_neox", neox},
          {"olmo2", olmo2},
          {"parallel_norms_at_outputs", parallel},
          {"short_conv_and_based", based},
          {"short_conv_and_rebased", rebased}};
}

// Writes what PyTorch compares the model with.
void write_case(const ModelConfig& config, const std::filesystem::path& folder) {
  const PackedBatch batch = test::packed_batch({150, 1, 2, 65, 38}, config.vocab);
  test::ModelRun run(kBackend, config, batch);
  run.disturb_constants();
  const double loss = run.backward();

  const ParamRegistry& registry = run.model().registry();
  std::filesystem::create_directory(folder);
  write_tensors(folder / "weights.safetensors", named(registry, run.masters()));
  write_tensors(folder / "gradients.safetensors", named(registry, run.gradients()));
  write_tensors(folder / "logits.safetensors",
                {{"logits", {run.batch().tokens(), config.vocab}, run.logits()}});
  test::write_file(folder / "model.json", model_json(config).dump());
  test::write_file(folder / "batch.json", nlohmann::json{{"tokens", batch.tokens},
                                                         {"targets", batch.targets},
                                                         {"positions", batch.positions},
                                                         {"cu_seqlens", batch.cu_seqlens},
                                                         {"loss", loss}}
                                              .dump());
}

// The tests that run share one process of Python, which takes a second to load PyTorch.
class PyTorchParity : public testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    std::string why;
    skip_ = kBackend == Backend::kCuda && !cuda_available(&why) ? "no GPU: " + why : "";
    if (!skip_.empty()) return;
    folder_ = std::make_unique<test::TemporaryFolder>();
    std::vector<std::string> folders;
    for (const Case& c : cases()) {
      if (!runs(c)) continue;
      folders.push_back(*folder_ / c.name);
      write_case(c.model, folders.back());
    }
    int code = kNoTorch;
    std::string output;
    for (const std::string python : {"/usr/bin/python3", "python3"}) {
      std::vector<std::string> command = {
          python,          SBTRAIN_PARITY_SCRIPT, "--loss-tolerance",
          kTolerance.loss, "--tolerance",         kTolerance.tensors};
      if (kBackend == Backend::kCuda) {
        command.insert(command.end(), {"--stored", "bfloat16", "--device", "auto"});
      }
      command.push_back("--folders");
      command.insert(command.end(), folders.begin(), folders.end());
      test::Process process(command, *folder_ / "log");
      code = process.wait(600);
      output = process.output();
      if (code != kNoTorch && code != 127) break;
    }
    if (code == kNoTorch || code == 127) skip_ = "no Python with torch here: " + output;
    if (skip_.empty() && code != 0) throw std::runtime_error(output);
  }
  static void TearDownTestSuite() { folder_.reset(); }

  // Whether the test of a case is among those that were asked for.
  static bool runs(const Case& c) {
    const testing::TestSuite& suite = *testing::UnitTest::GetInstance()->current_test_suite();
    for (int i = 0; i < suite.total_test_count(); ++i) {
      const testing::TestInfo& test = *suite.GetTestInfo(i);
      if (test.should_run() && std::string(test.name()).ends_with("/" + name_of(c))) return true;
    }
    return false;
  }
  static std::string name_of(const Case& c) {
    return c.name + (kBackend == Backend::kCuda ? "_cuda" : "");
  }

  static inline std::unique_ptr<test::TemporaryFolder> folder_;
  static inline std::string skip_;  // why no test can run; empty: they can
};
INSTANTIATE_TEST_SUITE_P(All, PyTorchParity, testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.name + (kBackend == Backend::kCuda ? "_cuda" : "");
});

TEST_P(PyTorchParity, LossLogitsAndGradients) {
  if (!skip_.empty()) GTEST_SKIP() << skip_;
  const std::filesystem::path folder = *folder_ / GetParam().name;
  std::printf("%s", test::read_file(folder / "log").c_str());
  EXPECT_EQ(test::read_file(folder / "code"), "0");
}

}  // namespace
}  // namespace sbtrain
