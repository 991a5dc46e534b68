// The command line: help, messages, exit codes, and the options that reach the configuration.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "cli/cli.h"
#include "config/schema.h"
#include "support/process.h"

namespace sbtrain::command_line_test {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int code;
  std::string out, err;
};

Outcome run(const std::vector<std::string>& arguments) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = run_command_line(arguments);
  std::string out = testing::internal::GetCapturedStdout();
  return {code, std::move(out), testing::internal::GetCapturedStderr()};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string config_path(const std::string& name) {
  return std::string(SBTRAIN_SOURCE) + "/configs/" + name + ".yaml";
}

// Collects every command by its full name from the registered subcommands.
void collect(const CLI::App& app, const std::vector<std::string>& words,
             std::vector<std::vector<std::string>>& commands) {
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    std::vector<std::string> full = words;
    full.push_back(sub->get_name());
    commands.push_back(full);
    collect(*sub, full, commands);
  }
}

std::vector<std::vector<std::string>> all_commands() {
  CLI::App app;
  Action action;
  add_subcommands(Command(app), action);
  std::vector<std::vector<std::string>> commands;
  collect(app, {}, commands);
  return commands;
}

TEST(CommandLine, AloneItExplainsItself) {
  const Outcome outcome = run({});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* part : {"stick-breaking", "Commands:", "train", "generate", "ckpt",
                           "sbtrain --config configs/tiny_sb.yaml", "--dry-run"}) {
    EXPECT_TRUE(contains(outcome.out, part)) << part;
  }
}

TEST(CommandLine, EveryCommandHasHelp) {
  const std::vector<std::vector<std::string>> commands = all_commands();
  const std::vector<std::vector<std::string>> expected = {
      {"train"},          {"tokenizer", "train"}, {"prepare"},        {"data", "info"},
      {"data", "tasks"},  {"data", "verify"},     {"ckpt", "ls"},     {"ckpt", "verify"},
      {"eval"},           {"config", "show"},     {"config", "docs"}, {"generate"},
      {"bench", "train"}, {"bench", "attention"}, {"bench", "ops"},   {"bench", "collectives"}};
  for (const auto& command : expected) {
    EXPECT_EQ(std::count(commands.begin(), commands.end(), command), 1) << command.front();
  }
  for (std::vector<std::string> command : commands) {
    const std::string name = command.back();
    command.emplace_back("--help");
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.code, 0) << name;
    EXPECT_EQ(outcome.err, "") << name;
    EXPECT_TRUE(contains(outcome.out, "Usage: sbtrain " + command.front())) << outcome.out;
  }
}

TEST(CommandLine, HelpOfTrainListsTheConfigurationKeys) {
  const Outcome outcome = run({"train", "--help"});
  EXPECT_TRUE(contains(outcome.out, config_help()));
  EXPECT_TRUE(contains(outcome.out, "--train.lr  number, at least 0 [0.001]"));
}

TEST(CommandLine, Version) {
  const Outcome outcome = run({"--version"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out.substr(0, 9), "sbtrain 0");
  // Its first line is what it has always been; the others say what is inside, and what is found.
  for (const char* line : {"\n  compiled for ", "\n  CUDA backend ", "\n  MPI "}) {
    EXPECT_TRUE(contains(outcome.out, line)) << outcome.out;
  }
}

TEST(CommandLine, UsageErrors) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"tarin"}, "unknown command 'tarin' of 'sbtrain'; did you mean 'train'?"},
      {{"config", "shw"}, "unknown command 'shw' of 'sbtrain config'; did you mean 'show'?"},
      {{"config", "show", "--confg", "x"},
       "unknown option '--confg' of 'sbtrain config show'; did you mean '--config'?"},
      {{"config", "show", "--lr=3"},
       "unknown option '--lr' of 'sbtrain config show'; did you mean '--train.lr'?"},
      {{"--learning-rate=3e-4"},
       "unknown option '--learning-rate' of 'sbtrain train'; did you mean '--train.lr'?"},
      {{"--weight-decay=0.1"},
       "unknown option '--weight-decay' of 'sbtrain train'; did you mean '--train.weight_decay'?"},
      {{"--max_steps", "9"},
       "unknown option '--max_steps' of 'sbtrain train'; did you mean '--stages.0.length'?"},
      {{"config", "show", "stray"}, "unknown argument 'stray' of 'sbtrain config show'"},
      {{"config", "docs", "--train.lr=3"},
       "'sbtrain config docs' takes no configuration keys such as --train.lr"},
      {{"config", "show", "--train.lr"}, "--train.lr needs a value"},
      {{"--confg", "x"}, "unknown option '--confg' of 'sbtrain train'; did you mean '--config'?"},
      {{"train", "--stages=3"}, "'--stages' of 'sbtrain train'; it is a section: set one of its"},
      {{"sweep", "a.yaml", "--device=cpu"},
       "unknown option '--device' of 'sbtrain sweep'; did you mean '--set=device=...'?"},
      {{"config"}, "subcommand is required"},
      {{"config", "show", "--config", ""}, "--config: the value is empty"},
      {{"--init-from", ""}, "--init-from: the value is empty"},
      {{"--resume="}, "--resume: the value is empty"},
      {{"export", "--checkpoint", "run", "--output="}, "--output: the value is empty"},
      {{"prepare", "--output", "a.h5", "--input", "a", ""}, "--input: the value is empty"},
      {{"data", "info", "a.h5", ""}, "files: the value is empty"},
      {{"serve", "--checkpoint", "run", "--token-file="}, "--token-file: the value is empty"},
      {{"--world", "2"}, "--world requires --dry-run"},
      {{"--init-from-missing=initialise"}, "--init-from-missing requires --init-from"},
      {{"--dry-run", "--resume=none", "--checkpoint.resume=auto"},
       "--resume is short for --checkpoint.resume; give one of them"},
      {{"--dry-run", "--set", "machine.mfu=0.4", "--mfu=0.5"},
       "--mfu is short for --machine.mfu; give one of them"},
      {{"config", "show", "--config"}, "--config"}};
  for (const auto& [arguments, expected] : cases) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 2) << expected;
    EXPECT_EQ(outcome.out, "") << expected;
    EXPECT_EQ(outcome.err.substr(0, 7), "error: ") << expected;
    EXPECT_TRUE(contains(outcome.err, expected)) << outcome.err;
  }
}

// What a script gives whose variable was never set.
TEST(CommandLine, EmptyValuesAreRefused) {
  const std::vector<std::vector<std::string>> cases = {
      {"export", "--checkpoint", "runs/none", "--output", ""},
      {"export", "--checkpoint", "", "--output", "export"},
      {"import", "--input", "", "--output", "runs/none"},
      {"import", "--input", "folder", "--output="},
      {"prepare", "--input", "", "--tokenizer", "my.model", "--output", "my.h5"},
      {"prepare", "--input", "text", "", "--tokenizer", "my.model", "--output", "my.h5"},
      {"prepare", "--input", "text", "--tokenizer", "", "--output", "my.h5"},
      {"prepare", "--input", "text", "--tokenizer", "my.model", "--output", ""},
      {"tokenizer", "train", "--input", "text", "--output", ""},
      {"data", "info", ""},
      {"ckpt", "ls", ""},
      {"eval", "--checkpoint", "runs/none", "--attention-maps", "", "--text", "A"},
      {"generate", "--checkpoint", ""},
      {"bench", "train", "--trace", ""},
      {"train", "--init-from", ""},
      {"--config", ""},
      {"sweep", ""},
      {"sweep", "--out", "", config_path("sweeps/mqar")}};
  for (const std::vector<std::string>& arguments : cases) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, ": the value is empty\n")) << outcome.err;
  }
}

TEST(CommandLine, InputWithoutTextIsNamed) {
  const test::TemporaryFolder temporary;
  const fs::path& scratch = temporary.path();
  fs::create_directories(scratch / "folder");
  for (const char* file : {"empty.txt", "folder/a.txt", "folder/b.txt"}) {
    const std::ofstream empty(scratch / file);
  }
  std::ofstream(scratch / "blank.jsonl") << R"({"text": ""})" << '\n';
  const std::string tokenizer = scratch / "tokenizer.json";
  const std::string english = std::string(SBTRAIN_SOURCE) + "/tests/data/english.jsonl";
  ASSERT_EQ(run({"tokenizer", "train", "--type", "bpe", "--vocab", "300", "--input", english,
                 "--output", tokenizer})
                .code,
            0);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {scratch / "empty.txt", scratch / "empty.txt"},
      {scratch / "blank.jsonl", scratch / "blank.jsonl"},
      {scratch / "folder", (scratch / "folder/a.txt").string() + " and 1 other"}};
  for (const auto& [input, name] : cases) {
    const Outcome prepared = run(
        {"prepare", "--tokenizer", tokenizer, "--input", input, "--output", scratch / "out.h5"});
    EXPECT_EQ(prepared.code, 2);
    EXPECT_TRUE(contains(prepared.err, name + ": there is no text in the input")) << prepared.err;
    const Outcome trained =
        run({"tokenizer", "train", "--input", input, "--output", scratch / "out.model"});
    EXPECT_EQ(trained.code, 2);
    EXPECT_TRUE(contains(trained.err, name + ": there is no text to train")) << trained.err;
  }
}

// A finished folder is renamed to its name, which must be possible before any work is done.
TEST(CommandLine, NoFolderIsWrittenWhereItCannotBeRenamedTo) {
  const test::TemporaryFolder temporary;
  const fs::path& scratch = temporary.path();
  fs::create_directories(scratch / "empty");
  fs::create_directory_symlink("empty", scratch / "link");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"/", "exists and is not an empty folder"},
      {scratch / "link", "exists and is not an empty folder"},
      {".", "cannot be replaced"},
      {scratch / "empty/.", "cannot be replaced"},
      {"..", "cannot be replaced"}};
  for (const auto& [output, expected] : cases) {
    for (const char* command : {"import", "export"}) {
      const char* from = command == std::string("import") ? "--input" : "--checkpoint";
      const Outcome outcome = run({command, from, "not/there", "--output", output});
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, fmt::format("--output {}: {}", output, expected)))
          << outcome.err;
    }
  }
}

// An option that another one leaves without effect would let a figure pass for what it is not.
TEST(CommandLine, EvalRefusesOptionsWithoutEffect) {
  const std::vector<std::vector<std::string>> pairs = {
      {"--lengths", "64", "--tokens", "64"},
      {"--lengths", "64", "--sequence-length", "32"},
      {"--window", "64", "--sequence-length", "32"},
      {"--attention-maps", "maps", "--data", "a.h5"},
      {"--attention-maps", "maps", "--lengths", "64"},
      {"--attention-maps", "maps", "--window", "64"},
      {"--true-positions", "positions.json", "--recall"},
      {"--task-positions", "8", "--tokens", "64"}};
  for (const std::vector<std::string>& pair : pairs) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", "runs/none"};
    arguments.insert(arguments.end(), pair.begin(), pair.end());
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, " excludes --")) << outcome.err;
  }
}

TEST(CommandLine, ConfigurationErrorsExitWith3) {
  const Outcome missing = run({"config", "show", "--config", "missing.yaml"});
  EXPECT_EQ(missing.code, 3);
  EXPECT_EQ(missing.err, "error: cannot read 'missing.yaml': No such file or directory\n");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"config", "show", "--config", config_path("tiny_sb"),
                                 "--trian.lr=1"},
        std::vector<std::string>{"--config", config_path("tiny_sb"), "--trian.lr", "1"},
        std::vector<std::string>{"train", "--dry-run", "--config", config_path("tiny_sb"),
                                 "--trian.lr", "1"}}) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, 3);
    EXPECT_EQ(outcome.err, "error: --trian.lr: unknown key 'trian.lr'; did you mean 'train.lr'?\n");
  }
}

TEST(CommandLine, WithoutAConfigurationItsOptionIsNamed) {
  const std::vector<std::vector<std::string>> commands = {
      {"train"},    {"train", "--dry-run"},
      {"--seed=3"}, {"config", "show"},
      {"bench"},    {"bench", "decode", "--train.lr=1e-3"}};
  for (const std::vector<std::string>& command : commands) {
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_EQ(outcome.err,
              "error: there is no configuration: name its file, such as --config "
              "configs/tiny_sb.yaml\n");
  }
  // The options may be the whole of it.
  EXPECT_EQ(run({"config", "show", "--stages=[{length: 3 steps}]", "--data.task.type=mqar"}).code,
            0);
}

TEST(CommandLine, OptionsReachTheConfiguration) {
  ASSERT_EQ(setenv("SBTRAIN_TRAIN__LR", "0.5", 1), 0);
  ASSERT_EQ(setenv("SBTRAIN_TRAIN__CLIP", "0.5", 1), 0);
  const Outcome outcome = run({"config", "show", "--config", config_path("tiny_sb"),
                               "--train.lr=1e-4", "--stages.0.name", "train", "--seed", "9",
                               "--stages.0.schedule.warmup", "5 steps", "--set", "name=other"});
  unsetenv("SBTRAIN_TRAIN__LR");
  unsetenv("SBTRAIN_TRAIN__CLIP");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Config config = parse_config(outcome.out, "printed");
  EXPECT_EQ(config.train.lr, 1e-4);
  EXPECT_EQ(config.train.clip, 0.5);
  EXPECT_EQ(config.seed, 9U);
  EXPECT_EQ(config.name, "other");
  EXPECT_EQ(config.stages.at(0).schedule.warmup.count, 5);
}

// The number that a configuration's first line states: "# 577,984 parameters". Empty if it has
// none.
std::string stated_parameters(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const size_t end = line.find(" parameters");
  if (end == std::string::npos || line.find_first_not_of("0123456789,", 2) != end) return {};
  return line.substr(2, end - 2);
}

// Every shipped configuration can be planned without its data and its device, and has the
// parameters that its first line states.
TEST(CommandLine, EveryShippedConfigRunsDry) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SBTRAIN_SOURCE "/configs")) {
    if (entry.path().extension() != ".yaml") continue;
    const Outcome outcome = run({"train", "--dry-run", "--config", entry.path().string()});
    EXPECT_EQ(outcome.code, 0) << entry.path() << ": " << outcome.err;
    EXPECT_TRUE(contains(outcome.out, "parameters        " + stated_parameters(entry.path())))
        << entry.path() << ": " << outcome.out;
    ++count;
  }
  EXPECT_GE(count, 40);
}

// A model that exceeds the limits of the GPU's kernels is an error of the configuration, which is
// found without a GPU.
TEST(CommandLine, LimitsOfTheGpuAreErrorsOfTheConfiguration) {
  const std::vector<std::vector<std::string>> cases = {
      {"tiny_sb", "model.heads=1", "model.width=512"},
      {"tiny_sb", "model.heads=32", "model.width=640"},
      {"tiny_rope", "model.heads=1", "model.width=512"},
      {"tiny_sb", "model.heads=1024", "model.width=32768"},
      {"tiny_rebased", "model.heads=1", "model.width=256"},
      {"350m_alibi", "model.heads=512", "model.width=4096"},
      {"neox_coca", "model.heads=2", "model.width=1024"}};
  for (const std::vector<std::string>& c : cases) {
    const std::vector<std::string> plan = {"train", "--dry-run", "--config", config_path(c[0]),
                                           "--set", c[1],        "--set",    c[2]};
    const auto on = [&](const char* device) {
      std::vector<std::string> arguments = plan;
      arguments.insert(arguments.end(), {"--set", std::string("device=") + device});
      return run(arguments);
    };
    const Outcome cuda = on("cuda");
    EXPECT_EQ(cuda.code, 3) << c[0] << ": " << cuda.err;
    EXPECT_TRUE(contains(cuda.err, "on CUDA: ")) << cuda.err;
    EXPECT_TRUE(contains(cuda.err, "model.")) << cuda.err;
    EXPECT_EQ(on("cpu").code, 0) << c[0];
  }
}

TEST(CommandLine, DocsPrintTheReference) {
  EXPECT_EQ(run({"config", "docs"}).out, config_markdown());
  EXPECT_EQ(run({"config", "docs", "train.lr"}).out, field_help("train.lr"));
  EXPECT_EQ(run({"config", "docs", "train.ir"}).code, 3);
}

TEST(CommandLine, ArgumentsAreNormalized) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(normalize_arguments({"--config", "a.yaml"}), (Words{"train", "--config", "a.yaml"}));
  EXPECT_EQ(normalize_arguments({"--train.lr=1"}), (Words{"train", "--set=train.lr=1"}));
  EXPECT_EQ(normalize_arguments({"--stages=[{name: a}]", "--train={lr: 1}"}),
            (Words{"train", "--set=stages=[{name: a}]", "--set=train={lr: 1}"}));
  EXPECT_EQ(normalize_arguments({"eval", "--data=a.h5"}), (Words{"eval", "--data=a.h5"}));
  EXPECT_EQ(normalize_arguments({"eval", "--train.lr", "-1"}),
            (Words{"eval", "--set=train.lr=-1"}));
  EXPECT_EQ(normalize_arguments({"eval", "--a.b", "--c.d=2"}),
            (Words{"eval", "--set=a.b", "--set=c.d=2"}));
  EXPECT_EQ(normalize_arguments({"eval", "--out=x/y.z", "--", "--a.b"}),
            (Words{"eval", "--out=x/y.z", "--", "--a.b"}));
  for (const char* own : {"-h", "--help", "--version"}) {
    EXPECT_EQ(normalize_arguments({own}), Words{own});
    EXPECT_EQ(normalize_arguments({"bench", own}), (Words{"bench", own}));
  }
  EXPECT_EQ(normalize_arguments({"bench"}), (Words{"bench", "train"}));
  EXPECT_EQ(normalize_arguments({"bench", "--config", "a.yaml"}),
            (Words{"bench", "train", "--config", "a.yaml"}));
  EXPECT_EQ(normalize_arguments({"bench", "--train.lr=1"}),
            (Words{"bench", "train", "--set=train.lr=1"}));
  EXPECT_EQ(normalize_arguments({"bench", "ops", "--json"}), (Words{"bench", "ops", "--json"}));
}

}  // namespace
}  // namespace sbtrain::command_line_test
