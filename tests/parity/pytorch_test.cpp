// Loss and gradients of a 2-layer model against PyTorch's autograd in fp32 (relative error 1e-4).
// Skipped where no Python with torch and numpy is found.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "core/philox.h"
#include "model/llama.h"
#include "ops/ops.h"
#include "parallel/communicator.h"
#include "parallel/param_shards.h"
#include "parallel/sharded_params.h"
#include "support/process.h"
#include "support/tensors.h"

namespace sbtrain {
namespace {

constexpr int kNoTorch = 77;  // exit code of pytorch_reference.py without torch

struct Batch {
  std::vector<int32_t> tokens, targets, positions, cu_seqlens = {0};
  int64_t valid = 0;
};

Batch random_batch(const std::vector<int32_t>& lengths, int64_t vocab) {
  Batch batch;
  const Philox random(3, RandomPurpose::kTest, "parity");
  for (const int32_t length : lengths) {
    for (int32_t i = 0; i < length; ++i) {
      const size_t t = batch.tokens.size();
      const bool valid = i + 1 < length && t % 11 != 5;
      batch.tokens.push_back(static_cast<int32_t>(random.bits(2 * t) % vocab));
      batch.targets.push_back(valid ? static_cast<int32_t>(random.bits(2 * t + 1) % vocab) : -1);
      batch.positions.push_back(i);
      batch.valid += valid;
    }
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
  }
  return batch;
}

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
      if (t.name == entry.name) writer.write(t.name, t.values.data(), t.values.size() * 4);
    }
  }
  writer.finish();
}

// The logical elements of every tensor in `flat_of(shard)`.
template <typename FlatOf>
std::vector<NamedTensor> tensors_of(const ShardedParams& params, FlatOf flat_of) {
  std::vector<NamedTensor> out;
  for (size_t u = 0; u < params.registry().units().size(); ++u) {
    const float* flat = flat_of(params.shard(static_cast<int>(u)));
    for (const PlacedTensor& tensor : params.registry().units()[u].tensors) {
      NamedTensor named{tensor.name, tensor.spec.shape, std::vector<float>(tensor.count)};
      for_each_run(tensor, 0, tensor.stored, [&](const ElementRun& run) {
        std::copy_n(flat + tensor.offset + run.storage, run.count,
                    named.values.begin() + run.logical);
      });
      out.push_back(std::move(named));
    }
  }
  return out;
}

nlohmann::json model_json(const ModelConfig& m) {
  nlohmann::json attention = nlohmann::json::array();
  for (const AttentionConfig& a : m.attention) {
    attention.push_back({{"type", a.type},
                         {"logit_scale", a.logit_scale},
                         {"remainder", a.remainder},
                         {"head_norm", a.head_norm},
                         {"attend_current", a.attend_current},
                         {"forget_gate", a.forget_gate},
                         {"position", a.position},
                         {"rope_base", a.rope_base},
                         {"rope_scaling", a.rope_scaling},
                         {"rope_factor", a.rope_factor},
                         {"rope_train_length", a.rope_train_length},
                         {"window", a.window},
                         {"variant", a.variant},
                         {"output_bias", a.output_bias}});
  }
  return {{"layers", m.layers},
          {"width", m.width},
          {"heads", m.heads},
          {"tied", m.tied},
          {"norm_eps", m.norm_eps},
          {"norm", m.norm},
          {"mlp", m.mlp},
          {"position", m.position},
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
  rich.attention[0].head_norm = true;
  rich.attention[0].forget_gate = true;
  rich.attention[0].remainder = "bias";
  ModelConfig value = base();
  value.attention[0].remainder = "value";
  value.attention[0].attend_current = true;
  value.embedding_multiplier = 3;
  value.residual_multiplier = 0.5;
  value.logits_multiplier = 0.25;
  ModelConfig rope = base();
  rope.attention[0].type = "softmax";
  ModelConfig mixed = base();
  mixed.attention.push_back(rope.attention[0]);
  mixed.attention[1].position = "none";
  const auto softmax = [](const char* position, int64_t window) {
    AttentionConfig a;
    a.type = "softmax";
    a.position = position;
    a.window = window;
    return a;
  };
  ModelConfig biases = base();
  biases.heads = 4;
  biases.attention = {softmax("alibi", 0), softmax("fire", 50)};
  ModelConfig stretched = base();
  stretched.layers = 3;
  stretched.attention.clear();
  for (const char* scaling : {"linear", "ntk", "dynamic_ntk"}) {
    AttentionConfig a = softmax("rope", 0);
    a.rope_scaling = scaling;
    a.rope_factor = 2;
    a.rope_train_length = 40;
    stretched.attention.push_back(a);
  }
  ModelConfig coca = base();
  coca.attention.resize(2);
  for (AttentionConfig& a : coca.attention) a.type = "coca";
  coca.attention[1].variant = "strict";
  ModelConfig gpt = base();
  gpt.norm = "layernorm";
  gpt.mlp = "gelu";
  gpt.position = "learned";
  gpt.max_positions = 200;
  gpt.attention = {softmax("none", 0)};
  gpt.attention[0].output_bias = true;
  ModelConfig based = gpt;
  based.attention = {AttentionConfig{}, AttentionConfig{}};
  based.attention[0].type = "short_conv";
  based.attention[1].type = "based";
  ModelConfig rebased = based;
  rebased.mlp = "none";
  rebased.heads = 12;  // 5 values for each head, 60 in all
  rebased.attention[1].type = "rebased";
  return {{"alibi_and_fire", biases},
          {"rope_scaling", stretched},
          {"coca", coca},
          {"gpt", gpt},
          {"short_conv_and_based", based},
          {"short_conv_and_rebased", rebased},
          {"stickbreaking", plain},
          {"bias_norm_gate", rich},
          {"value_current_multipliers", value},
          {"rope", rope},
          {"mixed_layers", mixed}};
}

class PyTorchParity : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, PyTorchParity, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(PyTorchParity, LossAndGradients) {
  const ModelConfig& config = GetParam().model;
  test::CpuStream cpu;
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Llama model(config);
  ShardedParams params(model.registry(), cpu.stream, *communicator, /*with_training=*/true);
  params.initialize(4);
  params.zero_gradients();
  const Batch batch = random_batch({150, 1, 2, 65, 38}, config.vocab);
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  test::Owned tokens_T = test::integers(batch.tokens);
  test::Owned targets_T = test::integers(batch.targets);
  test::Owned positions_T = test::integers(batch.positions);
  test::Owned cu_seqlens = test::integers(batch.cu_seqlens);
  test::Owned loss_T = test::poisoned({tokens});
  model.forward_backward(cpu, params,
                         {.tokens_T = tokens_T,
                          .targets_T = targets_T,
                          .sequences = {.cu_seqlens = cu_seqlens,
                                        .positions_T = positions_T,
                                        .count = 5,
                                        .max_seqlen = 150}},
                         loss_T, 1.0f / static_cast<float>(batch.valid), 0.0f);

  const test::TemporaryFolder folder;
  write_tensors(folder / "weights.safetensors",
                tensors_of(params, [](const auto& shard) { return shard.master.f32(); }));
  write_tensors(folder / "gradients.safetensors",
                tensors_of(params, [](const auto& shard) { return shard.gradient.f32(); }));
  test::write_file(folder / "model.json", model_json(config).dump());
  const double loss = ops::sum(cpu, loss_T) / static_cast<double>(batch.valid);
  test::write_file(folder / "batch.json", nlohmann::json{{"tokens", batch.tokens},
                                                         {"targets", batch.targets},
                                                         {"positions", batch.positions},
                                                         {"cu_seqlens", batch.cu_seqlens},
                                                         {"loss", loss}}
                                              .dump());
  int code = kNoTorch;
  std::string output;
  for (const std::string python : {"/usr/bin/python3", "python3"}) {
    test::Process process({python, SBTRAIN_PARITY_SCRIPT, "--model", folder / "model.json",
                           "--weights", folder / "weights.safetensors", "--batch",
                           folder / "batch.json", "--gradients", folder / "gradients.safetensors"},
                          folder / "log");
    code = process.wait();
    output = process.output();
    if (code != kNoTorch && code != 127) break;
  }
  if (code == kNoTorch || code == 127) GTEST_SKIP() << "no Python with torch here: " << output;
  EXPECT_EQ(code, 0) << output;
}

}  // namespace
}  // namespace sbtrain
