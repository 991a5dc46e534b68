#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "config/schema.h"
#include "core/error.h"
#include "optim/adamw.h"
#include "support/process.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMinimal =
    "data: {sources: [{path: a.h5}]}\n"
    "stages: [{length: 10}]\n";

Override option(const std::string& assignment) {
  return parse_override(assignment);
}

Config minimal(const std::vector<Override>& overrides = {}, const std::string& more = "") {
  return parse_config(kMinimal + more, "test.yaml", overrides);
}

// The message of the error that `text` with `overrides` gives; empty without an error.
std::string message(const std::vector<Override>& overrides, const std::string& more = "") {
  try {
    minimal(overrides, more);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    return error.what();
  }
}

class Files : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_ / "parts"); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  }

  test::TemporaryFolder temporary_;
  const fs::path& folder_ = temporary_.path();
};

TEST(Load, DefaultsAreThoseOfTheStructs) {
  Config expected;
  expected.data.sources = {{"a.h5", 1.0}};
  expected.stages.resize(1);
  expected.stages[0].length = {10, Duration::Unit::kSteps};
  EXPECT_EQ(minimal(), expected);
}

TEST(Load, ReadsEveryKindOfValue) {
  const Config config = parse_config(R"(
name: everything
seed: 18446744073709551615
model:
  layers: 6
  tied: false
  norm_eps: 1e-6
  attention:
    - {type: softmax, position: none, logit_scale: 0.125}
    - {type: stickbreaking, remainder: bias, head_norm: true, skip_epsilon: 0}
train: {batch: 1K, micro_batch: 8}
data:
  sources:
    - {path: a.h5, weight: 0.25}
    - path: "with space.h5"
  validation: only.h5
stages:
  - {name: one, length: 1e9 tokens, schedule: {type: wsd, warmup: 10M tokens, decay_fraction: 0.2,
                                               final_ratio: 0.1}}
  - name: two
    length: 50
    schedule: {type: exponential, scale: 0.5}
    sources: [{path: b.h5}]
)",
                                     "test.yaml");
  EXPECT_EQ(config.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(config.model.layers, 6);
  EXPECT_FALSE(config.model.tied);
  ASSERT_EQ(config.model.attention.size(), 2U);
  const auto first = flatten(config.model.attention[0]);
  const auto second = flatten(config.model.attention[1]);
  EXPECT_EQ(first.at("position"), "none");
  EXPECT_EQ(first.at("logit_scale"), "0.125");
  EXPECT_EQ(second.at("remainder"), "bias");
  EXPECT_EQ(second.at("skip_epsilon"), "0");
  EXPECT_EQ(config.train.batch, 1000);
  EXPECT_EQ(config.data.sources[0].weight, 0.25);
  EXPECT_EQ(config.data.sources[1].path, "with space.h5");
  EXPECT_EQ(config.data.validation, std::vector<std::string>{"only.h5"});
  EXPECT_EQ(config.stages[0].length, (Duration{1000000000, Duration::Unit::kTokens}));
  EXPECT_EQ(config.stages[0].schedule.decay_fraction, 0.2);
  EXPECT_EQ(config.stages[1].schedule.scale, 0.5);
  EXPECT_EQ(config.stages[1].sources[0].path, "b.h5");
  EXPECT_EQ(parse_config(config_yaml(config), "printed"), config);
}

TEST(Load, TextsRoundTripWhateverTheyHold) {
  for (const char* text : {"null", "~",     "true",   "-",           "- a",
                           "a: b", "# x",   "\"q\"",  "it's",        "{}",
                           "[a]",  " lead", "trail ", "back\\slash", "gr\xc3\xbc\xc3\x9f",
                           "*a",   "&a",    "!t",     "%d",          "@",
                           "`",    "123",   "",       "a #b",        "'",
                           "\\n",  "NULL",  "<<"}) {
    Config config = minimal();
    config.data.tokenizer = text;
    config.data.validation = {text + std::string("x"), "b"};
    EXPECT_EQ(parse_config(config_yaml(config), "printed"), config) << text;
  }
}

TEST(Load, FlattenNamesEveryKeyThatApplies) {
  const auto flat = flatten(minimal());
  EXPECT_EQ(flat.at("train.lr"), "0.001");
  EXPECT_EQ(flat.at("stages.0.length"), "10 steps");
  EXPECT_EQ(flat.at("data.sources.0.path"), "a.h5");
  EXPECT_EQ(flat.at("data.validation"), "[]");
  EXPECT_EQ(flat.at("model.attention.remainder"), "none");
  EXPECT_FALSE(flat.contains("model.attention.position"));
}

TEST(Load, FlattenedKeysAreOverrides) {
  const Config config = minimal({}, "model: {attention: {type: softmax, rope_base: 5e5}}");
  std::vector<Override> overrides;
  for (const auto& [key, value] : flatten(config))
    overrides.push_back(Override{key, value, "--" + key});
  EXPECT_EQ(load_config("", overrides), config);
}

TEST_F(Files, PrecedenceIsDefaultsIncludeFileEnvironmentOptions) {
  write("base.yaml", "train: {lr: 0.1, clip: 0.1, beta1: 0.1, beta2: 0.1}\n");
  const std::string path = write(
      "top.yaml",
      std::string("include: base.yaml\ntrain: {clip: 0.2, beta1: 0.2, beta2: 0.2}\n") + kMinimal);
  const char* const environment[] = {"HOME=/", "SBTRAIN_TRAIN__BETA2=0.3",
                                     "SBTRAIN_TRAIN__BETA1=0.3", nullptr};
  std::vector<Override> overrides = environment_overrides(environment);
  overrides.push_back(option("train.beta2=0.4"));
  const Config config = load_config(path, overrides);
  const AdamWOptions& adamw = config.train.optimizer.options.as<AdamWOptions>();
  EXPECT_EQ(adamw.eps, AdamWOptions{}.eps);
  EXPECT_EQ(config.train.lr, 0.1);
  EXPECT_EQ(config.train.clip, 0.2);
  EXPECT_EQ(adamw.beta1, 0.3);
  EXPECT_EQ(adamw.beta2, 0.4);
}

TEST_F(Files, IncludesAreRelativeNestedAndOrdered) {
  write("parts/deep.yaml", "name: deep\nseed: 1\ntrain: {lr: 0.5}\n");
  write("parts/a.yaml", "include: deep.yaml\nname: a\nseed: 2\n");
  write("parts/b.yaml", "seed: 3\ndata: {sources: [{path: b1.h5}, {path: b2.h5}]}\n");
  const std::string path =
      write("top.yaml", std::string("include: [parts/a.yaml, parts/b.yaml]\n") + kMinimal);
  const Config config = load_config(path);
  EXPECT_EQ(config.name, "a");
  EXPECT_EQ(config.seed, 3U);
  EXPECT_EQ(config.train.lr, 0.5);
  ASSERT_EQ(config.data.sources.size(), 1U);  // lists are replaced
  EXPECT_EQ(config.data.sources[0].path, "a.h5");
}

TEST_F(Files, AFileMayBeIncludedTwice) {
  write("common.yaml", "seed: 7\n");
  write("a.yaml", "include: common.yaml\n");
  write("b.yaml", "include: common.yaml\n");
  const std::string path = write("top.yaml", std::string("include: [a.yaml, b.yaml]\n") + kMinimal);
  EXPECT_EQ(load_config(path).seed, 7U);
}

TEST_F(Files, AnEmptySectionChangesNothing) {
  write("base.yaml", "train: {lr: 0.5}\n");
  const std::string path =
      write("top.yaml", std::string("include: base.yaml\ntrain:\n") + kMinimal);
  EXPECT_EQ(load_config(path).train.lr, 0.5);
}

TEST_F(Files, OptionsOfAnIncludedTypeLapseWhenTheTypeChanges) {
  write("base.yaml",
        "model: {attention: {type: stickbreaking, remainder: value, logit_scale: 0.5}}\n");
  const std::string path =
      write("top.yaml", std::string("include: base.yaml\n") + kMinimal +
                            "model: {attention: {type: softmax, position: rope}}\n");
  const AttentionConfig attention = load_config(path).model.attention.at(0);
  EXPECT_EQ(attention.type, "softmax");
  EXPECT_EQ(attention, parse_attention("{type: softmax, logit_scale: 0.5}"));  // both types have it
}

TEST_F(Files, OptionsLapseThroughTheKeyThatDecidesThem) {
  const std::string path = write(
      "top.yaml", std::string(kMinimal) +
                      "model: {attention: {type: softmax, position: rope, rope_base: 500}}\n");
  EXPECT_EQ(load_config(path, {option("model.attention.type=stickbreaking")}).model.attention.at(0),
            AttentionConfig{});
  EXPECT_EQ(load_config(path, {option("model.attention.position=none")}).model.attention.at(0),
            parse_attention("{type: softmax, position: none}"));
}

TEST_F(Files, FilesThatCannotBeReadAreNamed) {
  for (const std::string& path : {(folder_ / "missing.yaml").string(), folder_.string()}) {
    try {
      load_config(path);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_NE(std::string(error.what()).find("cannot read '" + path + "'"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_THROW(load_config("/dev/zero"), Error);
}

TEST(Overrides, TakeScalarsAsTheyStand) {
  EXPECT_EQ(minimal({option("name=a: b #c")}).name, "a: b #c");
  EXPECT_EQ(minimal({option("data.tokenizer=null")}).data.tokenizer, "null");
  EXPECT_EQ(minimal({option("out=a=b")}).out, "a=b");
}

TEST(Overrides, ReachIntoLists) {
  const Config config =
      minimal({option("stages.0.length=50 steps"), option("stages.1.length=5M tokens"),
               option("stages.1.name=second"), option("data.sources.0.weight=2"),
               option("data.validation.0=v.h5"),
               option("stages.1.schedule={type: linear, final_ratio: 0.5}")});
  EXPECT_EQ(config.stages[0].length, (Duration{50, Duration::Unit::kSteps}));
  ASSERT_EQ(config.stages.size(), 2U);
  EXPECT_EQ(config.stages[1].name, "second");
  EXPECT_EQ(config.stages[1].schedule.final_ratio, 0.5);
  EXPECT_EQ(config.data.sources[0].path, "a.h5");
  EXPECT_EQ(config.data.sources[0].weight, 2);
  EXPECT_EQ(config.data.validation, std::vector<std::string>{"v.h5"});
}

TEST(Overrides, ReplaceLists) {
  EXPECT_EQ(minimal({option("data.validation=[a.h5, b.h5]")}).data.validation,
            (std::vector<std::string>{"a.h5", "b.h5"}));
  EXPECT_EQ(minimal({option("data.validation=a.h5")}).data.validation,
            std::vector<std::string>{"a.h5"});
  EXPECT_EQ(minimal({option("stages=[{length: 5}]")}).stages[0].length.count, 5);
}

TEST(Overrides, SingleAttentionNeedsNoIndex) {
  const Override value = option("model.attention.remainder=value");
  EXPECT_EQ(flatten(minimal({value})).at("model.attention.remainder"), "value");
  EXPECT_EQ(flatten(minimal({option("model.attention.0.remainder=value")}))
                .at("model.attention.remainder"),
            "value");
  const std::string list = "model: {attention: [{type: softmax}, {type: stickbreaking}]}";
  EXPECT_EQ(message({value}, list),
            "--model.attention.remainder: 'model.attention' is a list here; name the item, as in "
            "'model.attention.0.remainder'");
  EXPECT_EQ(flatten(minimal({option("model.attention.1.remainder=value")}, list))
                .at("model.attention.1.remainder"),
            "value");
}

TEST(Overrides, LaterOnesWin) {
  EXPECT_EQ(minimal({option("train.lr=1"), option("train.lr=2")}).train.lr, 2);
}

TEST(Overrides, ErrorsNameTheSource) {
  EXPECT_EQ(message({option("trian.lr=1")}),
            "--trian.lr: unknown key 'trian.lr'; did you mean 'train.lr'?");
  EXPECT_EQ(message({option("train.lr=fast")}), "--train.lr: expected a number, got 'fast'");
  EXPECT_EQ(message({option("train.beta1=1")}), "--train.beta1: 1 is out of range: 0 to below 1");
  EXPECT_EQ(message({option("stages.0.lenght=1")}),
            "--stages.0.lenght: unknown key 'stages.0.lenght'; did you mean 'stages.0.length'?");
  EXPECT_EQ(message({option("stages.3.length=1")}),
            "--stages.3.length: 'stages' has 1 item; the next index is 1");
  EXPECT_EQ(message({option("stages=[{lenght: 1}]")}),
            "2 problems in the configuration\n"
            "  --stages: missing key 'stages.0.length'\n"
            "  --stages: unknown key 'stages.0.lenght'; did you mean 'stages.0.length'?");
  EXPECT_EQ(message({option("stages=[")}).substr(0, 21), "--stages: YAML syntax");
  EXPECT_EQ(message({option("stages.*.length=1")}),
            "--stages.*.length: unknown key 'stages.*.length'; did you mean 'stages.0.length'?");
  EXPECT_EQ(message({option("model.heads=3")}),
            "--model.heads: width 128 is not divisible by 3 heads");
  EXPECT_EQ(message({option("train.lr.x=3")}),
            "--train.lr.x: unknown key 'train.lr.x'; did you mean 'train.lr'?");
  EXPECT_EQ(message({option("train..lr=3")}),
            "--train..lr: unknown key 'train..lr'; did you mean 'train.lr'?");
  EXPECT_EQ(message({option("name=\xff")}), "--name: expected text, got '\\xff'");
}

TEST(Overrides, ANameWithoutValueIsAUsageError) {
  try {
    parse_override("train.lr");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_STREQ(error.what(), "--train.lr needs a value: --train.lr=VALUE");
  }
}

TEST(Environment, NamesMapToKeys) {
  const char* const environment[] = {"SBTRAIN_STAGES__0__LENGTH=50 steps",
                                     "SBTRAIN_TRAIN__SEQUENCE_LENGTH=64",
                                     "SBTRAIN_SEED=3",
                                     "SBTRAIN",
                                     "NOT_SBTRAIN_SEED=4",
                                     "SBTRAIN_PYTHON=python3",
                                     "SBTRAIN_ATTENTION_LIBRARY=lib.so",
                                     "SBTRAIN_BUILD=build",
                                     nullptr};
  const Config config = minimal(environment_overrides(environment));
  EXPECT_EQ(config.stages[0].length.count, 50);
  EXPECT_EQ(config.train.sequence_length, 64);
  EXPECT_EQ(config.seed, 3U);
  EXPECT_TRUE(environment_overrides(nullptr).empty());
}

TEST(Environment, ErrorsNameTheVariable) {
  const char* const environment[] = {"SBTRAIN_TRIAN__LR=1", "SBTRAIN_TRAIN__CLIP=x", nullptr};
  EXPECT_EQ(message(environment_overrides(environment)),
            "2 problems in the configuration\n"
            "  SBTRAIN_TRAIN__CLIP: expected a number, got 'x'\n"
            "  SBTRAIN_TRIAN__LR: unknown key 'trian.lr'; did you mean 'train.lr'?");
}

// Checkpoints hold the configuration of their run, which earlier versions did not check so.
TEST(AllowChanges, AStoredConfigurationMayHaveAnyNames) {
  const std::string text = "checkpoint: {allow_changes: [modle.width]}\n";
  EXPECT_EQ(minimal({}, text).checkpoint.allow_changes, std::vector<std::string>{"modle.width"});
}

TEST(Validate, ChecksConfigurationsBuiltInCode) {
  Config config = minimal();
  EXPECT_NO_THROW(validate_config(config));
  config.model.heads = 3;
  try {
    validate_config(config);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "configuration: model.heads: width 128 is not divisible by 3 heads");
  }
}

}  // namespace
}  // namespace sbtrain
