// Models as transformers saves them: imported, they compute its logits, and they are exported as
// they were; and the rotary positions that a config.json means.
#include "export/hf_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>

#include "attention/registry.h"
#include "attention/rotary.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_match.h"
#include "config/schema.h"
#include "core/error.h"
#include "export/float_format.h"
#include "export/hf_export.h"
#include "export/hf_import.h"
#include "serve/inference.h"
#include "support/process.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

class HfModel : public testing::TestWithParam<const char*> {
 protected:
  static fs::path model() { return fs::path(SBTRAIN_TEST_MODELS) / GetParam(); }
  template <typename T>
  static std::vector<T> values(const SafetensorsReader& file, const std::string& name) {
    const SafetensorsEntry& entry = file.at(name);
    std::vector<T> values(entry.bytes() / sizeof(T));
    file.read(entry, 0, values.data(), entry.bytes());
    return values;
  }

  test::TemporaryFolder folder_;
};

TEST_P(HfModel, ComputesTheSameLogits) {
  const HfFolder source(model());
  const HfImport imported = import_hf(source, folder_ / "run");
  const CheckpointReader checkpoint = open_checkpoint(folder_ / "run");
  EXPECT_EQ(checkpoint.folder(), imported.checkpoint);
  const Config config = parse_config(checkpoint.config_yaml(), "config.yaml");

  const SafetensorsReader reference(model() / "reference.safetensors");
  const std::vector<int32_t> tokens = values<int32_t>(reference, "tokens");
  const std::vector<float> theirs = values<float>(reference, "logits");
  const auto count = static_cast<int64_t>(tokens.size());
  InferenceModel inference(config.model, checkpoint, Backend::kCpu,
                           plan_generation(config.model, Backend::kCpu, count, 0));
  const std::vector<float> ours = inference.logits(tokens);
  ASSERT_EQ(ours.size(), theirs.size());
  float largest = 0;
  float difference = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    largest = std::max(largest, std::fabs(theirs[i]));
    difference = std::max(difference, std::fabs(ours[i] - theirs[i]));
  }
  EXPECT_LE(difference, 1e-5f * largest);
}

TEST_P(HfModel, IsExportedAsItWas) {
  const HfFolder source(model());
  import_hf(source, folder_ / "run");
  const CheckpointReader checkpoint = open_checkpoint(folder_ / "run");
  const Config config = parse_config(checkpoint.config_yaml(), "config.yaml");
  const HfLayout layout = hf_layout(config, ExportFormat::kHf, FileDType::kBF16);
  EXPECT_EQ(layout.architecture, source.architecture());
  export_hf(checkpoint, config, layout, {.output = folder_ / "hf", .dtype = FileDType::kBF16});

  const SafetensorsReader before(model() / "model.safetensors");
  const SafetensorsReader after(folder_ / "hf/model.safetensors");
  ASSERT_EQ(after.entries().size(), before.entries().size());
  for (const SafetensorsEntry& entry : before.entries()) {
    EXPECT_EQ(after.at(entry.name).shape, entry.shape);
    EXPECT_EQ(values<uint16_t>(after, entry.name), values<uint16_t>(before, entry.name))
        << entry.name;
  }
}

// Gives the model in `folder` a vocabulary of `vocab` tokens, and weights of zero.
void widen_vocabulary(const fs::path& folder, int64_t vocab) {
  const fs::path file = folder / "model.safetensors";
  std::vector<SafetensorsEntry> entries;
  const SafetensorsReader before(file);
  for (const SafetensorsEntry& entry : before.entries()) {
    entries.push_back({entry.name, entry.dtype, entry.shape});
    if (entry.name == "model.embed_tokens.weight" || entry.name == "lm_head.weight") {
      entries.back().shape.at(0) = vocab;
    }
  }
  fs::remove(file);
  SafetensorsWriter writer(Storage(), file, entries, {});
  for (const SafetensorsEntry& entry : writer.entries()) {
    const std::vector<uint8_t> zeros(entry.bytes());
    writer.write(entry.name, 0, zeros.data(), zeros.size());
  }
  writer.finish();
  auto config = nlohmann::json::parse(std::ifstream(folder / "config.json"));
  config["vocab_size"] = vocab;
  std::ofstream(folder / "config.json") << config;
}

// The architecture follows from what a module says of its options: its name is nothing to export.
TEST(HfExport, AsksModulesWhatTheyAre) {
  register_attention([](AttentionRegistry& registry) {
    AttentionModule renamed = registry.at("softmax");
    renamed.name = "renamed";
    renamed.bench.clear();
    registry.add(std::move(renamed));
  });
  const auto layout = [](const char* attention) {
    Config config;
    config.model.attention = {parse_attention(attention)};
    return hf_layout(config, ExportFormat::kHf, FileDType::kF32);
  };
  EXPECT_EQ(layout("{type: renamed}").architecture, "LlamaForCausalLM");
  EXPECT_EQ(layout("{type: renamed, window: 3}").config.at("sliding_window"), 3);
  EXPECT_EQ(layout("{type: renamed, qk_norm: true}").architecture, "Qwen3ForCausalLM");
  EXPECT_EQ(layout("{type: softmax, position: alibi}").architecture, "SbtrainForCausalLM");
  EXPECT_THROW(layout("{type: renamed, position: alibi}"), Error);
}

// Slashes at the end are left aside, up to the root.
TEST(HfExport, TheRootIsNoNewFolder) {
  for (const char* output : {"/", "//", "/usr/", "/usr//"}) {
    try {
      check_export_output(output, "elsewhere");
      ADD_FAILURE() << output;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage) << output;
    }
  }
}

TEST(HfExport, OnlyTheLastMissingFoldersAreMade) {
  EXPECT_NO_THROW(check_export_output(fs::temp_directory_path() / "exported/model", "elsewhere"));
  for (const fs::path& output :
       {fs::path("/no-such-folder/model"), fs::temp_directory_path() / "no/such/model"}) {
    try {
      check_export_output(output, "elsewhere");
      ADD_FAILURE() << output;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage) << output;
    }
  }
}

// A folder with a tokenizer says whether texts begin with bos, which prompts then do as well.
TEST(HfImport, KnowsWhetherTextsBeginWithBos) {
  const test::TemporaryFolder folder;
  const fs::path source = folder / "model";
  fs::copy(fs::path(SBTRAIN_TEST_MODELS) / "llama3", source);
  widen_vocabulary(source, 505);
  const fs::path tokenizers = fs::path(SBTRAIN_TEST_MODELS).parent_path() / "tokenizer";
  const auto imported = [&](const char* name) {
    import_hf(HfFolder(source), folder / name);
    const auto state = nlohmann::json::parse(open_checkpoint(folder / name).state_json());
    const auto loader = nlohmann::json::parse(state.at("loader").get<std::string>());
    return loader.at("starts_with_bos").get<bool>();
  };
  fs::copy(tokenizers / "llama3/tokenizer.json", source);
  EXPECT_TRUE(imported("by_post_processor"));
  std::ofstream(source / "tokenizer_config.json") << R"({"add_bos_token": false})";
  EXPECT_FALSE(imported("by_configuration"));
}

// A model without its tokenizer is only made for who asks for it.
TEST(HfImport, ATokenizerThatCannotBeReadEndsIt) {
  const test::TemporaryFolder folder;
  const fs::path source = folder / "model";
  fs::copy(fs::path(SBTRAIN_TEST_MODELS) / "llama3", source);
  widen_vocabulary(source, 505);
  const fs::path tokenizers = fs::path(SBTRAIN_TEST_MODELS).parent_path() / "tokenizer";
  auto tokenizer = nlohmann::json::parse(std::ifstream(tokenizers / "llama3/tokenizer.json"));
  for (auto& part : tokenizer["pre_tokenizer"]["pretokenizers"]) part["add_prefix_space"] = true;
  std::ofstream(source / "tokenizer.json") << tokenizer;
  try {
    import_hf(HfFolder(source), folder / "run");
    ADD_FAILURE() << "imported";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    const std::string what = error.what();
    EXPECT_NE(what.find("add_prefix_space"), std::string::npos) << what;
    EXPECT_NE(what.find("--without-tokenizer"), std::string::npos) << what;
  }
  EXPECT_FALSE(fs::exists(folder / "run") || fs::exists(folder / "run.tmp"));
  EXPECT_FALSE(import_hf(HfFolder(source), folder / "run", false).has_tokenizer);
  EXPECT_FALSE(fs::exists(folder / "run/tokenizer.json"));
}

// `config` with the keys of `change` in place of its own.
void expect_refused_by_key(nlohmann::json config, const std::string& key,
                           const nlohmann::json& change) {
  config.update(change);
  try {
    config_from_hf(config, true, "config.json");
    ADD_FAILURE() << change;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig) << change;
    EXPECT_NE(std::string(error.what()).find(key), std::string::npos) << error.what();
  }
}

// Values that another program would follow, or that mean nothing.
TEST(HfImport, ConfigurationsThatItCannotFollowAreRefusedByKey) {
  nlohmann::json good = {
      {"vocab_size", 96},       {"hidden_size", 64},        {"intermediate_size", 56},
      {"num_hidden_layers", 2}, {"num_attention_heads", 2}, {"max_position_embeddings", 128},
      {"model_type", "llama"},  {"rms_norm_eps", 1e-5},     {"quantization_config", {}}};
  EXPECT_NO_THROW(config_from_hf(good, true, "config.json"));
  const nlohmann::json yarn = {{"type", "yarn"}, {"factor", 4.0}};
  const std::vector<std::pair<std::string, nlohmann::json>> changes = {
      {"quantization_config", {{"quantization_config", {{"quant_method", "gptq"}}}}},
      {"max_position_embeddings", {{"max_position_embeddings", -1}}},
      {"max_position_embeddings", {{"max_position_embeddings", 0}}},
      {"max_position_embeddings", {{"max_position_embeddings", (1 << 24) + 1}}},
      {"max_position_embeddings", {{"max_position_embeddings", uint64_t{1} << 63}}},
      {"max_position_embeddings", {{"max_position_embeddings", 1e30}}},
      {"max_position_embeddings", {{"max_position_embeddings", -1}, {"rope_scaling", yarn}}},
      {"original_max_position_embeddings",
       {{"original_max_position_embeddings", uint64_t{1} << 63}, {"rope_scaling", yarn}}},
      {"hidden_size", {{"hidden_size", ~uint64_t{0}}}},
      {"rms_norm_eps", {{"rms_norm_eps", 4.6e18}}},
      {"rms_norm_eps", {{"rms_norm_eps", 1}}},
      {"rms_norm_eps", {{"rms_norm_eps", 0}}},
      {"rms_norm_eps", {{"rms_norm_eps", -1e-5}}},
      {"norm_eps", {{"model_type", "sbtrain"}, {"sbtrain", {{"norm_eps", 4.6e18}}}}}};
  for (const auto& [key, change] : changes) {
    expect_refused_by_key(good, key, change);
  }
  good["max_position_embeddings"] = 1 << 24;
  EXPECT_NO_THROW(config_from_hf(good, true, "config.json"));
}

// The same of the other families, each with what its own models may say.
TEST(HfImport, OtherFamiliesAreRefusedByKeyToo) {
  const nlohmann::json gpt2 = {{"model_type", "gpt2"}, {"vocab_size", 96}, {"n_embd", 32},
                               {"n_layer", 2},         {"n_head", 4},      {"n_positions", 64}};
  nlohmann::json neox = {
      {"model_type", "gpt_neox"},     {"vocab_size", 96},       {"hidden_size", 32},
      {"intermediate_size", 56},      {"num_hidden_layers", 2}, {"num_attention_heads", 2},
      {"max_position_embeddings", 64}};
  nlohmann::json olmo2 = neox;
  olmo2["model_type"] = "olmo2";
  const nlohmann::json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const std::vector<std::tuple<nlohmann::json, std::string, nlohmann::json>> changes = {
      {gpt2, "n_positions", {{"n_positions", 0}}},
      {gpt2, "n_positions", {{"n_positions", nullptr}}},
      {gpt2, "n_embd", {{"n_embd", INT64_MAX}}},
      {gpt2, "activation_function", {{"activation_function", "relu"}}},
      {gpt2, "layer_norm_epsilon", {{"layer_norm_epsilon", 1}}},
      {gpt2, "scale_attn_by_inverse_layer_idx", {{"scale_attn_by_inverse_layer_idx", true}}},
      {gpt2, "add_cross_attention", {{"add_cross_attention", true}}},
      {gpt2, "heads", {{"n_head", 5}}},
      {neox, "hidden_act", {{"hidden_act", "quick_gelu"}}},
      {neox, "rotary_pct", {{"rotary_pct", 0}}},
      {neox, "rotary_pct", {{"rope_parameters", {{"partial_rotary_factor", 1.5}}}}},
      {neox, "rope_fraction", {{"rotary_pct", 0.2}}},  // 3 of 16 channels
      {neox, "rope_fraction", {{"rope_scaling", yarn}}},
      {neox, "layer_norm_eps", {{"layer_norm_eps", -1e-5}}},
      {neox, "attention_bias", {{"attention_bias", 1}}},
      {olmo2, "hidden_act", {{"hidden_act", "gelu"}}},
      {olmo2, "mlp_bias", {{"mlp_bias", true}}},
      {olmo2, "partial_rotary_factor", {{"partial_rotary_factor", 0.5}}},
      {olmo2, "model_type", {{"model_type", "olmo"}}}};
  for (const auto& [good, key, change] : changes) {
    EXPECT_NO_THROW(config_from_hf(good, true, "config.json"));
    expect_refused_by_key(good, key, change);
  }
}

// What a config.json of older programs says, and what it means where it says nothing.
TEST(HfImport, DefaultsOfTheFamilies) {
  const nlohmann::json old_pythia = {
      {"model_type", "gpt_neox"},      {"vocab_size", 96},       {"hidden_size", 64},
      {"intermediate_size", 56},       {"num_hidden_layers", 2}, {"num_attention_heads", 2},
      {"max_position_embeddings", 64}, {"rotary_pct", 0.5},      {"rotary_emb_base", 700},
      {"hidden_act", "gelu"}};
  const auto model_of = [](const nlohmann::json& config) {
    return config_from_hf(config, true, "config.json").model;
  };
  ModelConfig model = model_of(old_pythia);
  EXPECT_TRUE(model.parallel_residual && !model.tied);
  EXPECT_EQ(model.mlp, MlpKind::kGelu);
  EXPECT_EQ(model.norm, NormKind::kLayerNorm);
  EXPECT_EQ(model.norm_eps, 1e-5);
  EXPECT_EQ(model.attention.at(0),
            parse_attention("{type: softmax, rope_fraction: 0.5, rope_base: 700, qkv_bias: true, "
                            "output_bias: true}"));
  nlohmann::json bare = old_pythia;
  bare.erase("rotary_pct");
  bare.erase("rotary_emb_base");
  bare.erase("hidden_act");
  EXPECT_EQ(model_of(bare).attention.at(0),
            parse_attention("{type: softmax, rope_fraction: 0.25, qkv_bias: true, output_bias: "
                            "true}"));
  const nlohmann::json gpt2 = {{"model_type", "gpt2"}, {"vocab_size", 96}, {"n_embd", 32},
                               {"n_layer", 2},         {"n_head", 4},      {"n_positions", 64},
                               {"n_inner", nullptr}};
  model = model_of(gpt2);
  EXPECT_TRUE(model.tied && !model.parallel_residual);
  EXPECT_EQ(model.mlp, MlpKind::kGeluTanh);
  EXPECT_EQ(model.inner, 128);
  EXPECT_EQ(model.max_positions, 64);
  EXPECT_EQ(config_from_hf(gpt2, true, "config.json").train.sequence_length, 64);
}

// GPT-2 of the hub: the names of its body alone, and masks beside the weights.
TEST(HfImport, GptWithoutPrefixAndWithMasks) {
  const test::TemporaryFolder temporary;
  const fs::path& source = temporary.path();
  const fs::path original = fs::path(SBTRAIN_TEST_MODELS) / "gpt2";
  fs::copy(original / "config.json", source);
  const SafetensorsReader before(original / "model.safetensors");
  constexpr std::string_view kPrefix = "transformer.";
  std::vector<SafetensorsEntry> entries;
  for (const SafetensorsEntry& entry : before.entries()) {
    ASSERT_TRUE(entry.name.starts_with(kPrefix)) << entry.name;
    entries.push_back({entry.name.substr(kPrefix.size()), entry.dtype, entry.shape});
  }
  for (const char* mask : {"h.0.attn.bias", "h.1.attn.bias"}) {
    entries.push_back({mask, FileDType::kU8, {1, 1, 4, 4}});
  }
  SafetensorsWriter writer(Storage(), source / "model.safetensors", entries, {});
  for (const SafetensorsEntry& entry : writer.entries()) {
    std::vector<uint8_t> bytes(entry.bytes());
    if (entry.dtype != FileDType::kU8) {
      before.read(before.at(std::string(kPrefix) + entry.name), 0, bytes.data(), bytes.size());
    }
    writer.write(entry.name, 0, bytes.data(), bytes.size());
  }
  writer.finish();
  const HfFolder with_prefix(original);
  const HfFolder without(source);
  ASSERT_EQ(without.names(), with_prefix.names());
  for (const std::string& name : without.names()) {
    ASSERT_EQ(without.shape(name), with_prefix.shape(name)) << name;
    const int64_t count = checked_numel(without.shape(name));
    std::vector<float> a(static_cast<size_t>(count));
    std::vector<float> b(a.size());
    without.read(name, 0, count, a.data());
    with_prefix.read(name, 0, count, b.data());
    EXPECT_EQ(a, b) << name;
  }
  EXPECT_NO_THROW(check_match(
      match_weights(without, Transformer(without.config().model).registry()), without.name()));
}

// Models that differ from a family in one thing are none of it.
TEST(HfExport, FamiliesAreExact) {
  const auto architecture = [](const std::string& attention, auto change) {
    Config config;
    config.model.attention = {parse_attention(attention)};
    change(config.model);
    return hf_layout(config, ExportFormat::kHf, FileDType::kF32).architecture;
  };
  const auto neox = [](ModelConfig& m) {
    m.norm = NormKind::kLayerNorm;
    m.mlp = MlpKind::kGelu;
    m.parallel_residual = true;
  };
  const auto gpt2 = [](ModelConfig& m) {
    m.norm = NormKind::kLayerNorm;
    m.mlp = MlpKind::kGeluTanh;
    m.position = PositionEmbedding::kLearned;
    m.max_positions = 256;
  };
  const auto olmo2 = [](ModelConfig& m) { m.norm_position = NormPosition::kOutput; };
  const auto also = [](auto first, auto second) {
    return [=](ModelConfig& m) {
      first(m);
      second(m);
    };
  };
  const std::string own = "SbtrainForCausalLM";
  const std::string rope = "{type: softmax, rope_fraction: 0.5}";
  const std::string plain = "{type: softmax, position: none, qkv_bias: true, output_bias: true}";
  const std::string joint = "{type: softmax, qk_norm: true, qk_norm_scope: joint}";
  EXPECT_EQ(architecture(rope, neox), "GPTNeoXForCausalLM");
  EXPECT_EQ(architecture("{type: softmax}", neox), "GPTNeoXForCausalLM");
  EXPECT_EQ(architecture("{type: softmax, qkv_bias: true}", neox), own);
  EXPECT_EQ(architecture("{type: softmax, window: 4}", neox), own);
  EXPECT_EQ(architecture("{type: softmax, logit_scale: 0.5}", neox), own);
  EXPECT_EQ(architecture(joint, neox), own);
  EXPECT_EQ(architecture(rope, also(neox, [](ModelConfig& m) { m.kv_heads = 2; })), own);
  EXPECT_EQ(architecture(rope, also(neox, [](ModelConfig& m) { m.head_dim = 64; })), own);
  EXPECT_EQ(architecture(rope, also(neox, [](ModelConfig& m) { m.logits_multiplier = 2; })), own);
  EXPECT_EQ(architecture(rope, also(neox, olmo2)), own);
  EXPECT_EQ(architecture(rope, also(neox, gpt2)), own);
  EXPECT_EQ(architecture(rope, [](ModelConfig&) {}), own);  // a Llama that is rotated in part
  EXPECT_EQ(architecture("{type: softmax}", [](ModelConfig& m) { m.parallel_residual = true; }),
            own);
  EXPECT_EQ(architecture(plain, gpt2), "GPT2LMHeadModel");
  EXPECT_EQ(architecture(plain, also(gpt2, [](ModelConfig& m) { m.parallel_residual = true; })),
            own);
  EXPECT_EQ(architecture("{type: softmax, position: none}", gpt2), own);
  EXPECT_EQ(architecture("{output_bias: true, qkv_bias: true}", gpt2), own);
  EXPECT_EQ(architecture(joint, olmo2), "Olmo2ForCausalLM");
  EXPECT_EQ(architecture(joint, [](ModelConfig&) {}), own);
  EXPECT_EQ(architecture("{type: softmax, qk_norm: true}", olmo2), own);
  EXPECT_EQ(architecture("{type: softmax}", olmo2), own);
  EXPECT_EQ(architecture("{type: softmax, qk_norm: true}", [](ModelConfig&) {}),
            "Qwen3ForCausalLM");
}

// Programs differ in which of two different tables they take.
TEST(HfImport, ATiedHeadIsACopyOfTheEmbedding) {
  const test::TemporaryFolder temporary;
  const fs::path& source = temporary.path();
  const fs::path file = source / "model.safetensors";
  const fs::path original = fs::path(SBTRAIN_TEST_MODELS) / "llama3";
  const SafetensorsReader before(original / "model.safetensors");
  auto config = nlohmann::json::parse(std::ifstream(original / "config.json"));
  config["tie_word_embeddings"] = true;
  std::ofstream(source / "config.json") << config;
  const auto write_with_head = [&](uint8_t change) {
    fs::remove(file);
    SafetensorsWriter writer(Storage(), file, before.entries(), {});
    for (const SafetensorsEntry& entry : before.entries()) {
      const bool head = entry.name == "lm_head.weight";
      const SafetensorsEntry& from = head ? before.at("model.embed_tokens.weight") : entry;
      std::vector<uint8_t> bytes(entry.bytes());
      before.read(from, 0, bytes.data(), bytes.size());
      if (head) bytes.back() = static_cast<uint8_t>(bytes.back() ^ change);
      writer.write(entry.name, 0, bytes.data(), bytes.size());
    }
    writer.finish();
  };
  write_with_head(0);
  EXPECT_TRUE(HfFolder(source).config().model.tied);
  write_with_head(1);
  try {
    const HfFolder folder(source);
    ADD_FAILURE() << "read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_NE(std::string(error.what()).find("tie_word_embeddings"), std::string::npos);
  }
}

// The file is whole, so that nothing but the values shows that no model can begin with them.
class NotFinite : public testing::TestWithParam<uint16_t> {
 protected:
  void SetUp() override { fs::copy(fs::path(SBTRAIN_TEST_MODELS) / "qwen3", source()); }
  fs::path source() const { return folder_ / "model"; }

  // Makes the second last value of a tensor GetParam(), a bf16.
  void spoil() const {
    const fs::path file = source() / "model.safetensors";
    uint64_t header = 0;
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.read(reinterpret_cast<char*>(&header), sizeof(header));
    std::string text(header, ' ');
    stream.read(text.data(), static_cast<std::streamsize>(header));
    const auto entry = nlohmann::json::parse(text).at(kTensor);
    ASSERT_EQ(entry.at("dtype"), "BF16");
    const auto end = entry.at("data_offsets").at(1).get<uint64_t>();
    const uint16_t value = GetParam();
    stream.seekp(static_cast<std::streamoff>(8 + header + end - 4));
    stream.write(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static constexpr const char* kTensor = "model.layers.0.mlp.up_proj.weight";
  static void expect_named(const Error& error, ExitCode code) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(kTensor), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("NaN or infinite"), std::string::npos) << error.what();
  }

  test::TemporaryFolder folder_;
};

TEST_P(NotFinite, WeightsAreNotImported) {
  spoil();
  try {
    import_hf(HfFolder(source()), folder_ / "run");
    ADD_FAILURE() << "imported";
  } catch (const Error& error) {
    expect_named(error, ExitCode::kNoCheckpoint);
  }
  EXPECT_FALSE(fs::exists(folder_ / "run") || fs::exists(folder_ / "run.tmp"));
}

TEST_P(NotFinite, NoRunBeginsWithThem) {
  spoil();
  const HfFolder folder(source());
  const Transformer model(folder.config().model);
  Memory memory(Backend::kCpu);
  Stream stream(memory);
  const auto communicator = make_single_process();
  const Mesh mesh(*communicator);
  ShardedParams params(model.registry(), stream, mesh, /*optimizer=*/nullptr);
  try {
    load_weights(folder, params);
    ADD_FAILURE() << "loaded";
  } catch (const Error& error) {
    expect_named(error, ExitCode::kNoCheckpoint);
  }
}

// As they are in a checkpoint of a run that has diverged.
TEST_P(NotFinite, WeightsAreNotExported) {
  import_hf(HfFolder(source()), folder_ / "good");
  const CheckpointReader good = open_checkpoint(folder_ / "good");
  Snapshot snapshot;
  snapshot.config_yaml = good.config_yaml();
  snapshot.state_json = good.state_json();
  for (const std::string& name : good.names(kModelKind)) {
    const std::vector<int64_t>& shape = good.shape(kModelKind, name);
    snapshot.tensors.push_back({{kModelKind, name, shape, 0, checked_numel(shape)}, {}, 0});
  }
  snapshot.read = [&](const TensorShard& tensor, int64_t begin, int64_t end, float* out) {
    good.read(kModelKind, tensor.name, begin, end, out);
    const uint16_t value = GetParam();
    if (tensor.name == kTensor) to_f32(FileDType::kBF16, &value, 1, out);
  };
  fs::create_directories(folder_ / "run");
  save_checkpoint(Storage(), folder_ / "run", snapshot, {}, 1);
  const CheckpointReader bad = open_checkpoint(folder_ / "run");
  const Config config = parse_config(bad.config_yaml(), "config.yaml");
  try {
    export_hf(bad, config, hf_layout(config, ExportFormat::kHf, FileDType::kBF16),
              {.output = folder_ / "hf", .dtype = FileDType::kBF16});
    ADD_FAILURE() << "exported";
  } catch (const Error& error) {
    expect_named(error, ExitCode::kDiverged);
  }
  EXPECT_FALSE(fs::exists(folder_ / "hf") || fs::exists(folder_ / "hf.tmp"));
}

INSTANTIATE_TEST_SUITE_P(Values, NotFinite, testing::Values(0x7FC0, 0xFFC1, 0x7F80, 0xFF80));

// transformers computes in f32, where a power of the base errs by up to 1e-6 of it.
TEST(HfRotary, HasTheFrequenciesOfTransformers) {
  std::ifstream file(fs::path(SBTRAIN_TEST_MODELS) / "rotary.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_GE(cases.size(), 9U);
  for (const auto& c : cases) {
    const auto name = c.at("name").get<std::string>();
    Config config = config_from_hf(c.at("config"), true, name);
    AttentionConfig& attention = config.model.attention.at(0);
    const RotaryOptions* options =
        attention_registry().at(attention.type).rotary(attention.options);
    ASSERT_NE(options, nullptr) << name;
    const Rotary rotary(*options, config.model);
    const auto ours = rotary.params(1, c.at("length").get<int64_t>()).frequencies;
    const auto theirs = c.at("frequencies").get<std::vector<double>>();
    ASSERT_EQ(ours.size(), theirs.size()) << name;
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_NEAR(ours[i], theirs[i], 2e-6 * theirs[i]) << name << ", pair " << i;
    }
    const auto factor = c.at("factor").get<double>();
    EXPECT_NEAR(rotary.logit_factor(), factor * factor, 1e-12) << name;
  }
}

// transformers computes `rope_scaling or rope_parameters`, and refuses a scaling without its
// factor.
TEST(HfRotary, RopeScalingComesBeforeRopeParameters) {
  const auto options_of = [](const nlohmann::json& changes) {
    nlohmann::json config = {{"vocab_size", 96},
                             {"hidden_size", 64},
                             {"intermediate_size", 56},
                             {"num_hidden_layers", 2},
                             {"num_attention_heads", 2},
                             {"max_position_embeddings", 128},
                             {"model_type", "llama"},
                             {"rope_theta", 5e5},
                             {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5e5}}}};
    config.update(changes);
    Config ours = config_from_hf(config, true, "config.json");
    AttentionConfig& attention = ours.model.attention.at(0);
    return *attention_registry().at(attention.type).rotary(attention.options);
  };
  EXPECT_EQ(options_of(nlohmann::json::object()).scaling, RotaryScaling::kNone);
  const nlohmann::json linear = {{"type", "linear"}, {"factor", 4.0}};
  const RotaryOptions added = options_of({{"rope_scaling", linear}});
  EXPECT_EQ(added.scaling, RotaryScaling::kLinear);
  EXPECT_EQ(added.factor, 4.0);
  EXPECT_EQ(added.base, 5e5);
  for (const nlohmann::json& none : {nlohmann::json(), nlohmann::json::object()}) {
    EXPECT_EQ(options_of({{"rope_scaling", none}, {"rope_parameters", linear}}).factor, 4.0);
  }
  for (const char* type : {"linear", "dynamic", "yarn", "llama3"}) {
    EXPECT_THROW(options_of({{"rope_scaling", {{"type", type}}}}), Error) << type;
  }
}

TEST(HfImport, ANameOfTheHubIsToldFromAFolder) {
  const auto message = [](const std::string& input) {
    try {
      const HfFolder folder(input);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message("HuggingFaceTB/SmolLM2-135M")
                .find("`hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`"),
            std::string::npos)
      << message("HuggingFaceTB/SmolLM2-135M");
  EXPECT_NE(message("gpt2-medium").find("`hf download gpt2-medium --local-dir gpt2-medium`"),
            std::string::npos);
  for (const char* path :
       {"SmolLM2-135M", "gpt3", "/models/gpt2", "./models", "a/b/c", "../model"}) {
    EXPECT_EQ(message(path).find("hf download"), std::string::npos) << message(path);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, HfModel,
                         testing::Values("llama3", "smollm2", "qwen2_5", "llama3_2", "qwen3",
                                         "qwen_yarn", "mistral", "gpt2", "gpt2_untied", "pythia",
                                         "gpt_neox", "neox_dynamic", "olmo2", "olmo2_grouped"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace sbtrain
