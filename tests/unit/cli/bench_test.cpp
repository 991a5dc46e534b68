// The benchmarks run on the CPU and print what they should. Speeds are not tested.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/cli.h"

namespace sbtrain::bench_test {
namespace {

using Json = nlohmann::json;

struct Outcome {
  int code;
  std::string out, err;
};

Outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_command_line(arguments);
  std::string out = testing::internal::GetCapturedStdout();
  return {code, std::move(out), testing::internal::GetCapturedStderr()};
}

std::vector<Json> rows(const std::string& text) {
  std::vector<Json> objects;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) objects.push_back(Json::parse(line));
  return objects;
}

size_t line_count(const std::string& text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<std::string> with(std::vector<std::string> words,
                              const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const std::vector<std::string> kTinyModel = {"--config",
                                             std::string(SBTRAIN_SOURCE) + "/configs/tiny_sb.yaml",
                                             "--device=cpu",
                                             "--steps=8",
                                             "--warmup=1",
                                             "--model.layers=1",
                                             "--model.width=32",
                                             "--model.inner=32",
                                             "--model.heads=2",
                                             "--model.vocab=64",
                                             "--train.sequence_length=16",
                                             "--train.micro_batch=2",
                                             "--train.batch=2",
                                             "--metrics.peak_tflops=1"};

// A figure of the CPU would pass for one of the implementation that was asked for.
TEST(BenchAttention, RefusesAnImplementationWithoutAGpu) {
  const Outcome outcome = run({"attention", "--device=cpu", "--implementation=hopper"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(contains(outcome.err, "--implementation hopper: only a GPU has several"));
}

TEST(BenchDecode, SaysWhichOptionsMakeATextTooLong) {
  const Outcome outcome =
      run({"decode", kTinyModel[0], kTinyModel[1], "--device=cpu", "--model.position=learned",
           "--model.max_positions=256", "--context=16", "--steps=200"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "424 tokens (--context, twice --steps")) << outcome.err;
}

TEST(BenchTrain, RefusesATraceWithoutAGpu) {
  const Outcome outcome = run(with({"train", "--trace", "never_written.json"}, kTinyModel));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "only a step on a GPU can be traced")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists("never_written.json"));
}

TEST(BenchTrain, SaysHowFastAStepIsAndWhereItsTimeGoes) {
  const Outcome outcome = run(with({"train", "--json"}, kTinyModel));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json result = Json::parse(outcome.out);
  EXPECT_EQ(result.at("tokens_per_step"), 32);
  EXPECT_GT(result.at("tokens_per_second"), 0.0);
  EXPECT_GT(result.at("memory_bytes"), 0);
  EXPECT_GT(result.at("mfu_causal"), 0.0);
  EXPECT_GT(result.at("mfu_full"), result.at("mfu_causal"));
  const double step = result.at("step_seconds");
  const double update = result.at("parts").at("optimizer");
  EXPECT_GT(update, 0.0);
  EXPECT_NEAR(result.at("mfu_passes").get<double>() * (step - update),
              result.at("mfu_causal").get<double>() * step, 1e-9 * step);
  EXPECT_DOUBLE_EQ(result.at("mfu_full").get<double>(),
                   result.at("flops_full").get<double>() / 1e12);
  for (const char* part :
       {"matrix products", "attention", "element-wise", "loss", "optimizer", "idle"}) {
    EXPECT_TRUE(result.at("parts").contains(part)) << part;
    EXPECT_GE(result.at("parts").at(part), 0.0) << part;
  }
}

TEST(BenchTrain, OptionsAloneMeanIt) {
  const Outcome outcome = run(kTinyModel);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* part : {"32 tokens a step", "tokens/s", "MFU", "of 1 TFLOP/s", "planned",
                           "matrix products", "idle"}) {
    EXPECT_TRUE(contains(outcome.out, part)) << part << "\n" << outcome.out;
  }
}

TEST(BenchAttention, HasARowForEachModuleHeadDimensionAndLength) {
  const std::vector<std::string> tiny = {
      "attention",         "--device=cpu",    "--tokens=64", "--width=32",
      "--head-dims=16,32", "--lengths=32,64", "--repeats=2", "--options=skip_epsilon=1e-6"};
  const Outcome outcome = run(with(tiny, {"--json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> all = rows(outcome.out);
  ASSERT_EQ(all.size(), 8U);
  EXPECT_EQ(all.front().at("module"), "stickbreaking");
  EXPECT_EQ(all.back().at("module"), "softmax");
  EXPECT_EQ(all.back().at("head_dim"), 32);
  EXPECT_EQ(all.back().at("length"), 64);
  for (const Json& row : all) {
    // 4 d L^2 / 2 for each of 32/d heads and 64/L documents
    const double flops = 2.0 * 32 * 64 * row.at("length").get<double>();
    EXPECT_NEAR(row.at("forward_flops").get<double>() * row.at("forward_seconds").get<double>(),
                flops, 1e-6 * flops);
    EXPECT_NEAR(row.at("backward_flops").get<double>() * row.at("backward_seconds").get<double>(),
                2.5 * flops, 1e-6 * flops);
  }
  const Outcome table = run(with(tiny, {"--modules=stickbreaking"}));
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_EQ(line_count(table.out), 5U) << table.out;
  EXPECT_FALSE(contains(table.out, "softmax"));
  EXPECT_EQ(run(with(tiny, {"--modules=softmax"})).code, 2);  // it has no skip_epsilon
}

TEST(BenchAttention, KnowsBasedAndReBased) {
  const Outcome outcome =
      run({"attention", "--device=cpu", "--tokens=64", "--width=32", "--head-dims=16",
           "--lengths=64", "--repeats=2", "--modules=based,rebased", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> all = rows(outcome.out);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].at("module"), "based");
  EXPECT_EQ(all[1].at("module"), "rebased");
}

TEST(BenchAttention, SizesThatDoNotFitAreUsageErrors) {
  for (const char* option : {"--lengths=100", "--head-dims=48", "--modules=linear",
                             "--options=window", "--options=window=5", "--repeats=0"}) {
    const Outcome outcome = run({"attention", "--device=cpu", option});
    EXPECT_EQ(outcome.code, 2) << option;
    EXPECT_TRUE(contains(outcome.err, "error:")) << option;
  }
}

TEST(BenchOps, HasTheMemoryBoundOpsAndTheProductsOfABlock) {
  const std::vector<std::string> tiny = {"ops",        "--device=cpu", "--tokens=32", "--width=32",
                                         "--inner=48", "--vocab=64",   "--repeats=2"};
  const Outcome outcome = run(with(tiny, {"--json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::set<std::string> by_memory, by_arithmetic;
  for (const Json& row : rows(outcome.out)) {
    EXPECT_GT(row.at("seconds"), 0.0);
    (row.contains("of_copy") ? by_memory : by_arithmetic).insert(row.at("op").get<std::string>());
  }
  EXPECT_EQ(by_memory,
            (std::set<std::string>{"copy", "fill", "rmsnorm", "rmsnorm_backward", "swiglu",
                                   "swiglu_backward", "rope", "embedding", "embedding_backward",
                                   "add_squared_norm", "adamw", "amax", "cast to fp8",
                                   "cast to fp8, transposed", "cast to fp8, both"}));
  EXPECT_EQ(by_arithmetic.size(), 13U + 12U);  // and those in fp8
  for (const char* name : {"qkv", "out backward input", "gate_up backward weight", "down",
                           "linear_cross_entropy", "qkv fp8", "down fp8 backward weight"}) {
    EXPECT_EQ(by_arithmetic.count(name), 1U) << name;
  }
  const Outcome table = run(tiny);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_EQ(line_count(table.out), 25U + 16U) << table.out;
  EXPECT_TRUE(contains(table.out, "GB/s"));
  EXPECT_TRUE(contains(table.out, "TFLOP/s"));
}

// A single rank; tests/multi runs several.
TEST(BenchCollectives, PrintsEveryCollective) {
  const Outcome outcome =
      run({"collectives", "--device=cpu", "--sizes=1", "--repeats=3", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = rows(outcome.out);
  std::set<std::string> names;
  for (const Json& row : objects) {
    names.insert(row.at("collective").get<std::string>());
    EXPECT_GT(row.at("seconds").get<double>(), 0);
    EXPECT_EQ(row.at("bytes").get<double>(), 1 << 20);
  }
  EXPECT_EQ(names, (std::set<std::string>{"all_gather", "all_to_all", "reduce_scatter",
                                          "all_reduce", "broadcast"}));
  const Outcome table = run({"collectives", "--device=cpu", "--sizes=1,2", "--repeats=3"});
  EXPECT_EQ(line_count(table.out), 2 + 2 * objects.size());
  // There are no products on the CPU to be timed beside it.
  EXPECT_TRUE(table.out.starts_with("1 rank; rates in GB/s\n")) << table.out;
  EXPECT_FALSE(contains(table.out, "beside")) << table.out;
  EXPECT_TRUE(contains(table.err, "one rank exchanges nothing")) << table.err;
}

}  // namespace
}  // namespace sbtrain::bench_test
