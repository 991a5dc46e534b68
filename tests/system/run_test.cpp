// Whole runs of the program: training, interruptions, faults and recovery from them.
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "eval/text_task.h"
#include "runs.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using test::loss_at;
using test::Process;
using test::read_file;
using test::SystemTest;
using test::write_file;

TEST_F(SystemTest, TrainsValidatesAndSaves) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  EXPECT_NE(output_.find("memory of the run: "), std::string::npos) << output_;
  const std::vector<std::string> history = records("run");
  EXPECT_LT(loss_at(history, 60, "validation/loss"), 0.9 * loss_at(history, 0, "validation/loss"));
  EXPECT_GT(loss_at(history, 60, "validation/bits_per_byte"), 0);
  EXPECT_EQ(newest("run").filename(), "step-00000060");
  EXPECT_NE(output_.find("step-00000060 ("), std::string::npos) << output_;  // with size and time
  EXPECT_TRUE(fs::exists(path("run") + "/config.yaml"));
  EXPECT_TRUE(fs::exists(path("run") + "/run.json"));
  const std::string status = read_file(path("run") + "/status.json");
  EXPECT_EQ(nlohmann::json::parse(status),
            (nlohmann::json{{"state", "complete"}, {"exit_code", 0}}));

  EXPECT_EQ(run(training("run")), 0);  // nothing left to do
  EXPECT_NE(output_.find("complete"), std::string::npos) << output_;

  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--data", path("b.h5"), "--tokens", "512",
                 "--json", "--device", "cpu"}),
            0)
      << output_;
  EXPECT_NEAR(nlohmann::json::parse(output_.substr(output_.find('{'))).at("loss").get<double>(),
              loss_at(history, 60, "validation/loss"), 1e-5);
}

// A model that has learned a repeating text continues it exactly.
// Also those of steps that save, validate or stop, after which the host waits for the device.
TEST_F(SystemTest, EveryRecordHasTheRateOfItsSteps) {
  const auto rates = [&](const std::vector<std::string>& more) {
    std::vector<std::string> options = {
        "--model.width=64",          "--model.inner=176",         "--train.sequence_length=128",
        "--train.batch=8",           "--stages.1.length=1 steps", "--checkpoint.every=5 steps",
        "--validation.every=7 steps"};
    options.insert(options.end(), more.begin(), more.end());
    fs::remove_all(path("run"));
    EXPECT_EQ(run(training("run", options)), 0) << output_;
    std::vector<double> values;
    std::istringstream lines(read_file(path("run") + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json record = nlohmann::json::parse(line);
      if (!record.contains("train/tokens_per_second")) continue;
      values.push_back(record.at("train/tokens_per_second"));
    }
    return values;
  };
  for (const char* every : {"--metrics.every=1", "--metrics.every=5"}) {
    std::vector<double> all = rates({every});
    ASSERT_GT(all.size(), 6U);
    std::ranges::sort(all);
    // Other work on the machine makes steps slower, but not faster.
    EXPECT_LT(all.back(), 20 * all[all.size() / 2]) << every;
  }
}

TEST_F(SystemTest, GenerateContinuesTheTrainedText) {
  const std::vector<std::string> days = {"Monday", "Tuesday",  "Wednesday", "Thursday",
                                         "Friday", "Saturday", "Sunday"};
  std::string week;
  for (int i = 0; i < 300; ++i) week += (i > 0 ? " " : "") + days[i % 7];
  write_file(path("week.txt"), week);
  ASSERT_EQ(run({"prepare", "--input", path("week.txt"), "--tokenizer", path("tokenizer.model"),
                 "--output", path("week.h5")}),
            0)
      << output_;
  write_file(path("week.yaml"),
             "include: config.yaml\nname: week\ndata: {sources: [{path: " + path("week.h5") +
                 "}], validation: []}\nvalidation: {every: 0}\n"
                 "train: {lr: 1e-2}\n"
                 "stages: [{name: week, length: 300 steps}]\n");
  ASSERT_EQ(run({"--config", path("week.yaml"), "--out", path("week")}), 0) << output_;
  ASSERT_EQ(run({"generate", "--checkpoint", path("week"), "--prompt", "Monday Tuesday Wednesday",
                 "--max-tokens", "24", "--temperature", "0", "--device", "cpu"}),
            0)
      << output_;
  EXPECT_EQ(output_.rfind("Monday Tuesday Wednesday Thursday Friday Saturday", 0), 0U) << output_;
}

TEST_F(SystemTest, ResultsDoNotDependOnTheNumberOfThreads) {
  for (const char* threads : {"1", "3"}) {
    environment_["OMP_NUM_THREADS"] = threads;
    ASSERT_EQ(run(training(threads)), 0) << output_;
  }
  EXPECT_EQ(records("1"), records("3"));
}

// Models of other layouts learn, save, evaluate and generate too.
TEST_F(SystemTest, OtherLayoutsTrain) {
  const std::map<std::string, std::string> models = {
      {"rebased",
       "{norm: layernorm, mlp: gelu, position: learned, max_positions: 64, heads: 5, attention: "
       "[{type: short_conv}, {type: rebased, feature_dim: 8}]}"},
      {"coca", "{attention: [{type: coca}, {type: softmax, position: fire, window: 16}]}"},
      {"gpt2",
       "{norm: layernorm, mlp: gelu_tanh, position: learned, max_positions: 64, attention: {type: "
       "softmax, position: none, qkv_bias: true, output_bias: true}}"},
      {"gpt_neox",
       "{norm: layernorm, mlp: gelu, parallel_residual: true, attention: {type: softmax, "
       "rope_fraction: 0.25, qkv_bias: true, output_bias: true}}"},
      {"olmo2",
       "{norm_position: output, attention: {type: softmax, qk_norm: true, qk_norm_scope: "
       "joint}}"}};
  for (const auto& [name, model] : models) {
    write_file(path(name + ".yaml"),
               fmt::format("include: config.yaml\nname: {}\nmodel: {}\n", name, model));
    ASSERT_EQ(run({"--config", path(name + ".yaml"), "--out", path(name)}), 0) << output_;
    const std::vector<std::string> history = records(name);
    EXPECT_LT(loss_at(history, 60, "validation/loss"),
              0.9 * loss_at(history, 0, "validation/loss"));
    ASSERT_EQ(run({"generate", "--checkpoint", path(name), "--device", "cpu", "--prompt", "The",
                   "--max-tokens", "9"}),
              0)
        << output_;
    EXPECT_EQ(output_.rfind("The", 0), 0U);
  }
  // Beyond the trained length rotary positions can be stretched, but learned positions end.
  const auto evaluate = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path(name), "--sequence-length",
                                          "128",  "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const auto loss = [&](const std::vector<std::string>& more) {
    EXPECT_EQ(evaluate("coca", more), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{'))).at("loss").get<double>();
  };
  EXPECT_NE(loss({}), loss({"--rope-scaling", "dynamic_ntk"}));
  EXPECT_EQ(loss({}), loss({"--rope-scaling", "dynamic_ntk", "--rope-train-length", "128"}));
  EXPECT_EQ(evaluate("rebased", {}), 3);
  EXPECT_NE(output_.find("64 learned positions"), std::string::npos) << output_;
  EXPECT_EQ(run({"generate", "--checkpoint", path("rebased"), "--max-tokens", "64"}), 2);
  EXPECT_NE(output_.find("--max-tokens: 64 of the model's 64 positions"), std::string::npos)
      << output_;
  EXPECT_EQ(evaluate("rebased", {"--rope-scaling", "linear"}), 2);
  EXPECT_NE(output_.find("no rotary positions"), std::string::npos) << output_;
}

nlohmann::json printed_json(const std::string& output) {
  return nlohmann::json::parse(output.substr(output.find('{')));
}

// With skip_epsilon 0 all keys are read, and the loss is that of `sbtrain eval`. A large one reads
// fewer keys where a window is longer than the first tile of keys; as this model's sticks are short
// there, its loss stays the same.
TEST_F(SystemTest, BenchSkipSaysWhatSkippingSaves) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  ASSERT_EQ(run({"bench", "skip", "--checkpoint", path("run"), "--device", "cpu", "--lengths",
                 "32,512", "--epsilons", "0.9,0.99", "--tokens", "512", "--batches", "2",
                 "--repeats", "2", "--json"}),
            0)
      << output_;
  std::vector<nlohmann::json> rows;
  std::istringstream lines(output_);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('{')) rows.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(rows.size(), 6U) << output_;
  for (const nlohmann::json& row : rows) {
    for (const char* pass :
         {"attention_forward", "attention_backward", "model_forward", "model_training"}) {
      EXPECT_GT(row.at(std::string(pass) + "_seconds"), 0) << pass;
    }
    EXPECT_EQ(row.at("keys_read_by_layer").size(), 2U);
    EXPECT_EQ(row.at("batch_tokens"), 512);
    EXPECT_EQ(row.at("windows"), row.at("length") == 32 ? 32 : 2);
    // A window of 32 tokens is one tile.
    const bool all = row.at("epsilon") == 0 || row.at("length") == 32;
    EXPECT_EQ(row.at("keys_read") == 1.0, all) << row;
  }
  EXPECT_EQ(rows[1].at("loss"), rows[0].at("loss"));
  EXPECT_NEAR(rows[4].at("loss").get<double>(), rows[3].at("loss").get<double>(), 1e-3);
  EXPECT_LE(rows[5].at("keys_read"), rows[4].at("keys_read"));
  EXPECT_GT(rows[5].at("keys_read"), 0.1);  // every query reads its own tile
  for (const size_t first : {size_t{0}, size_t{3}}) {
    ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--device", "cpu", "--lengths",
                   std::to_string(rows[first].at("length").get<int>()), "--tokens-per-length",
                   "1024", "--json"}),
              0)
        << output_;
    EXPECT_NEAR(nlohmann::json::parse(output_.substr(output_.find('{')))
                    .at("lengths")
                    .at(0)
                    .at("loss")
                    .get<double>(),
                rows[first].at("loss").get<double>(), 1e-5);
  }
  // eval --reach counts the same windows by head.
  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--device", "cpu", "--reach", "--lengths",
                 "32,512", "--tokens-per-length", "1024", "--json", path("reach.json")}),
            0)
      << output_;
  EXPECT_NE(output_.find("2 windows of 512 tokens, "), std::string::npos) << output_;
  const nlohmann::json reach = nlohmann::json::parse(read_file(path("reach.json"))).at("reach");
  EXPECT_EQ(reach.at(0).at("keys_read"), 1.0);
  EXPECT_EQ(reach.at(1).at("windows"), 2);
  ASSERT_EQ(reach.at(1).at("layers").size(), 2U);
  double sum = 0;
  for (const nlohmann::json& layer : reach.at(1).at("layers")) {
    EXPECT_EQ(layer.at("module"), "stickbreaking");
    for (const nlohmann::json& head : layer.at("heads")) sum += head.get<double>() / 2;
  }
  EXPECT_NEAR(sum / 2, reach.at(1).at("keys_read").get<double>(), 1e-9);

  EXPECT_EQ(run({"bench", "skip", "--checkpoint", path("run"), "--lengths", "9999999"}), 2);
  EXPECT_NE(output_.find("no document has 9999999 tokens"), std::string::npos) << output_;
}

// A cache that drops nothing has the loss of a forward pass, and the smaller it is the fewer bytes
// it takes.
TEST_F(SystemTest, DropsKeysByTheirGates) {
  ASSERT_EQ(run(training("run", {"--model.attention.forget_gate=true"})), 0) << output_;
  const auto evaluate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {
        "eval",      "--checkpoint", path("run"),           "--device", "cpu",
        "--lengths", "80",           "--tokens-per-length", "800"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  ASSERT_EQ(evaluate({"--json"}), 0) << output_;
  const double loss = printed_json(output_).at("lengths").at(0).at("loss");
  ASSERT_EQ(evaluate({"--drop-below", "0,1e-30,0.975,1", "--json"}), 0) << output_;
  const nlohmann::json rows = printed_json(output_).at("cache");
  ASSERT_EQ(rows.size(), 4U);
  EXPECT_NEAR(rows.at(0).at("loss").get<double>(), loss, 1e-5);
  EXPECT_EQ(rows.at(1).at("loss"), rows.at(0).at("loss"));
  EXPECT_EQ(rows.at(1).at("share_kept"), 1.0);
  EXPECT_LT(rows.at(2).at("share_kept"), 1.0);
  EXPECT_GT(rows.at(2).at("share_kept"), 0.0);
  EXPECT_EQ(rows.at(3).at("share_kept"), 0.0);
  EXPECT_NE(rows.at(3).at("loss"), rows.at(0).at("loss"));
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row.at("windows"), 10);
    EXPECT_EQ(row.at("tokens"), rows.at(0).at("tokens"));
    EXPECT_GT(row.at("tokens_per_second"), 0);
    EXPECT_LE(row.at("bytes_per_window"), rows.at(1).at("bytes_per_window"));
  }
  ASSERT_EQ(evaluate({"--drop-below", "0.975"}), 0) << output_;
  EXPECT_NE(output_.find("MB a window"), std::string::npos) << output_;
  const auto answer = [&](const char* bound) {
    return run({"eval", "--checkpoint", path("run"), "--device", "cpu", "--lengths", "400",
                "--tasks", "passkey", "--samples", "2", "--json", "--drop-below", bound});
  };
  ASSERT_EQ(answer("0.975"), 0) << output_;
  const nlohmann::json answered = printed_json(output_).at("tasks").at(0).at("lengths").at(0);
  EXPECT_LT(answered.at("share_kept"), 1.0) << answered;
  EXPECT_EQ(answer("0,1"), 2) << output_;

  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate", "--checkpoint",  path("run"),  "--device",
                                          "cpu",      "--prompt",      "The kernel", "--max-tokens",
                                          "90",       "--temperature", "0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  ASSERT_EQ(generate({"--json"}), 0) << output_;
  const nlohmann::json all = printed_json(output_);
  EXPECT_FALSE(all.contains("cache"));
  ASSERT_EQ(generate({"--json", "--drop-below", "1e-30"}), 0) << output_;
  const nlohmann::json same = printed_json(output_);
  EXPECT_EQ(same.at("text"), all.at("text"));
  EXPECT_EQ(same.at("cache").at("share_kept"), 1.0);
  ASSERT_EQ(generate({"--drop-below", "0.975"}), 0) << output_;
  EXPECT_NE(output_.find("% of the keys kept"), std::string::npos) << output_;
  EXPECT_EQ(generate({"--cache-share", "0.5"}), 2) << output_;
  EXPECT_EQ(generate({"--drop-below", "1e-30", "--cache-share", "0.1"}), 8) << output_;
  EXPECT_NE(output_.find("the cache is full"), std::string::npos) << output_;

  ASSERT_EQ(run(training("open", {"--stages.0.length=6 steps", "--stages.1.length=1 steps"})), 0);
  EXPECT_EQ(run({"generate", "--checkpoint", path("open"), "--prompt", "a", "--drop-below", "0.1"}),
            2);
  EXPECT_NE(output_.find("no layer of the model has a forget gate"), std::string::npos) << output_;
}

TEST_F(SystemTest, EvaluatesByLengthAndInSlidingWindows) {
  ASSERT_EQ(run(training("run")), 0) << output_;
  const auto evaluate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--device", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };

  const std::string file = path("results/lengths.json");
  ASSERT_EQ(evaluate({"--lengths", "16,64,100000", "--recall", "--json", file}), 0) << output_;
  EXPECT_NE(output_.find("windows"), std::string::npos) << output_;  // the table, beside the file
  EXPECT_NE(output_.find("absent: no document has 100000 tokens"), std::string::npos) << output_;
  const nlohmann::json lengths = nlohmann::json::parse(read_file(file));
  EXPECT_EQ(lengths.at("train_length"), 32);
  for (const nlohmann::json& result : lengths.at("lengths")) {
    if (result.at("length") == 100000) {
      EXPECT_NE(result.at("absent").get<std::string>().find("no document has 100000 tokens"),
                std::string::npos);
      continue;
    }
    EXPECT_GT(result.at("windows"), 0);
    EXPECT_GT(result.at("loss"), 0);
    EXPECT_EQ(result.at("loss_at_position").size(), result.at("length"));
    EXPECT_NEAR(result.at("loss_by_position").at(0), result.at("loss"), 1e-9);
    const nlohmann::json& documents = result.at("by_document");
    EXPECT_EQ(documents.at("document").size(), result.at("documents"));
    double loss_sum = 0;
    for (const nlohmann::json& loss : documents.at("loss_sum")) loss_sum += loss.get<double>();
    EXPECT_NEAR(loss_sum / result.at("tokens").get<double>(), result.at("loss"), 1e-9);
    EXPECT_LE(result.at("loss_interval").at(0), result.at("loss"));
    EXPECT_GE(result.at("loss_interval").at(1), result.at("loss"));
    for (const char* kind : {"token", "bigram"}) {
      const nlohmann::json& split = result.at("recall").at(kind);
      EXPECT_EQ(split.at("ar").at("tokens").get<int>() + split.at("non_ar").at("tokens").get<int>(),
                result.at("tokens"));
    }
  }
  ASSERT_EQ(evaluate({"--lengths", "16,64,100000", "--same-targets", "8", "--json"}), 0) << output_;
  const nlohmann::json same = printed_json(output_).at("lengths");
  EXPECT_EQ(same.at(0).at("tokens"), same.at(1).at("tokens"));
  EXPECT_NE(same.at(0).at("loss"), same.at(1).at("loss"));
  EXPECT_TRUE(same.at(2).contains("absent"));

  // The context of all 128 tokens gives the loss of these windows, and no difference from itself.
  ASSERT_EQ(evaluate({"--benefit", "128", "--benefit-targets", "16", "--json", file}), 0)
      << output_;
  EXPECT_NE(output_.find("full minus this one"), std::string::npos) << output_;
  const nlohmann::json benefit = nlohmann::json::parse(read_file(file)).at("benefit");
  ASSERT_EQ(benefit.size(), 2U);
  ASSERT_EQ(evaluate({"--lengths", "128", "--same-targets", "16", "--json"}), 0) << output_;
  const nlohmann::json whole = printed_json(output_).at("lengths").at(0);
  EXPECT_EQ(benefit.at(1).at("context"), 128);
  EXPECT_EQ(benefit.at(1).at("tokens"), whole.at("tokens"));
  EXPECT_NEAR(benefit.at(1).at("loss"), whole.at("loss"), 1e-6);
  EXPECT_EQ(benefit.at(1).at("difference"), 0);
  EXPECT_EQ(benefit.at(1).at("difference_interval"), (nlohmann::json{0, 0}));
  EXPECT_EQ(benefit.at(0).at("context"), 64);
  EXPECT_EQ(benefit.at(0).at("tokens"), whole.at("tokens"));
  const double difference = benefit.at(0).at("difference");
  EXPECT_NEAR(difference,
              benefit.at(1).at("loss").get<double>() - benefit.at(0).at("loss").get<double>(),
              1e-9);
  EXPECT_LE(benefit.at(0).at("difference_interval").at(0), difference);
  EXPECT_GE(benefit.at(0).at("difference_interval").at(1), difference);

  // What it runs on is said once, though the number of ranks depends on it too.
  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--lengths", "16"}), 0) << output_;
  const std::string device = "running on the CPU";
  EXPECT_EQ(output_.find(device), output_.rfind(device)) << output_;

  // Every token is predicted once, however far the windows lie apart.
  ASSERT_EQ(evaluate({"--window", "32", "--stride", "5", "--json"}), 0) << output_;
  const nlohmann::json close = printed_json(output_);
  ASSERT_EQ(evaluate({"--window", "32", "--stride", "5", "--json", file}), 0) << output_;
  EXPECT_NE(output_.find("perplexity"), std::string::npos) << output_;
  ASSERT_EQ(evaluate({"--window", "32", "--stride", "32", "--json", "-"}), 0) << output_;
  const nlohmann::json apart = printed_json(output_);
  EXPECT_EQ(close.at("tokens"), apart.at("tokens"));
  EXPECT_GT(close.at("windows"), apart.at("windows"));

  const std::vector<std::tuple<std::vector<std::string>, int, std::string>> bad = {
      {{"--lengths", "0"}, 2, "--lengths"},
      {{"--lengths", "16", "--same-targets", "17"}, 2, "17 targets do not fit"},
      {{"--lengths", "16", "--window", "8"}, 2, "--window"},
      {{"--same-targets", "8"}, 2, "--lengths"},
      {{"--tokens-per-length", "8"}, 2, "requires --lengths or --benefit"},
      {{"--bootstrap", "8"}, 2, "--bootstrap requires"},
      {{"--benefit", "128", "--benefit-targets", "129"}, 2, "129 targets do not fit"},
      {{"--benefit", "100000"}, 2, "no document has 100000 tokens"},
      {{"--benefit", "63"}, 2, "--benefit"},
      {{"--benefit", "128", "--lengths", "64"}, 2, "--benefit"},
      {{"--reach"}, 2, "--lengths"},
      {{"--reach", "--lengths", "100000"}, 2, "no document has 100000 tokens"},
      {{"--stride", "8"}, 2, "--window"},
      {{"--window", "8", "--stride", "9"}, 2, "--stride: 9"},
      {{"--lengths", "16,1073741824"}, 8, "GiB, and the machine has"},
      {{"--text", "a"}, 2, "--attention-maps"},
      {{"--attention-maps", path("maps")}, 2, "--attention-maps: 0 tokens"},
      {{"--attention-maps", path("maps"), "--text", ""}, 2, "give some with --text"},
      {{"--attention-maps", path("maps"), "--token-ids", "3,400"}, 2, "token 400 is outside"},
      {{"--true-positions", path("missing.json")}, 4, "missing.json"},
      {{"--task-positions", "3"}, 2, "--task-positions: the model was not trained on a task"}};
  for (const auto& [arguments, code, message] : bad) {
    EXPECT_EQ(evaluate(arguments), code) << output_;
    EXPECT_NE(output_.find(message), std::string::npos) << output_;
  }
}

TEST_F(SystemTest, AnswersTasksInPlainText) {
  ASSERT_EQ(run(training("run", {"--stages.0.length=6 steps", "--stages.1.length=1 steps"})), 0)
      << output_;
  const auto evaluate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--device", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  std::string words;
  for (int i = 0; i < 4000; ++i) words += i % 9 == 8 ? "word. " : "word ";
  write_file(path("text.txt"), words);
  const std::string file = path("tasks.json");
  ASSERT_EQ(
      evaluate({"--tasks", "passkey,vt,needle_local_multikey", "--lengths", "700,900", "--samples",
                "6", "--depths", "0,0.5,1", "--haystack", path("text.txt"), "--json", file}),
      0)
      << output_;
  const nlohmann::json json = nlohmann::json::parse(read_file(file));
  EXPECT_EQ(json.at("train_length"), 32);
  EXPECT_EQ(json.at("seed"), 42);
  ASSERT_EQ(json.at("tasks").size(), 3U);
  for (const nlohmann::json& task : json.at("tasks")) {
    for (const nlohmann::json& result : task.at("lengths")) {
      if (task.at("task") == "vt") {
        EXPECT_NE(result.at("absent").get<std::string>().find("vt needs"), std::string::npos);
        continue;
      }
      EXPECT_EQ(result.at("samples"), 6);
      EXPECT_LE(result.at("low"), result.at("score"));
      EXPECT_GE(result.at("high"), result.at("score"));
      ASSERT_EQ(result.at("depths").size(), 3U);
      EXPECT_EQ(result.at("depths").at(1).at("from"), 0.5);
      EXPECT_EQ(result.at("depths").at(1).at("samples"), 2);
      ASSERT_EQ(result.at("results").size(), 6U);
      for (const nlohmann::json& sample : result.at("results")) {
        const int64_t tokens = sample.at("tokens");
        EXPECT_LE(tokens + task.at("tokens_to_generate").get<int64_t>(), result.at("length"));
        EXPECT_LT(sample.at("position"), tokens);
        EXPECT_LE(sample.at("generated"), task.at("tokens_to_generate"));
      }
    }
  }
  // The results do not depend on how many prompts are continued together.
  ASSERT_EQ(evaluate({"--tasks", "passkey,vt,needle_local_multikey", "--lengths", "700,900",
                      "--samples", "6", "--depths", "0,0.5,1", "--haystack", path("text.txt"),
                      "--slots", "1", "--json"}),
            0)
      << output_;
  EXPECT_EQ(printed_json(output_), json);
  ASSERT_EQ(evaluate({"--tasks", "passkey", "--lengths", "400", "--samples", "3"}), 0) << output_;
  EXPECT_NE(output_.find("95% interval"), std::string::npos) << output_;

  write_file(path("few"), "one two three");
  const std::vector<std::tuple<std::vector<std::string>, int, std::string>> bad = {
      {{"--tasks", "passkey"}, 2, "--lengths"},
      {{"--tasks", "pass", "--lengths", "400"}, 2, "no task 'pass'; there are passkey"},
      {{"--samples", "3"}, 2, "--tasks"},
      {{"--depths", "0.5"}, 2, "--tasks"},
      {{"--tasks", "passkey", "--lengths", "400", "--depths", "1.5"}, 2, "--depths"},
      {{"--tasks", "passkey", "--lengths", "400", "--samples", "0"}, 2, "--samples"},
      {{"--tasks", "passkey", "--lengths", "400", "--slots", "65"}, 2, "--slots"},
      {{"--tasks", "passkey", "--lengths", "400", "--recall"}, 2, "--recall"},
      {{"--tasks", "passkey", "--lengths", "400", "--data", path("b.h5")}, 2, "--data"},
      {{"--tasks", "passkey", "--lengths", "16777217"}, 2, "--tasks takes up to 16777216"},
      {{"--tasks", "needle_local_uuid", "--lengths", "400"}, 2, "give it with --haystack"},
      {{"--tasks", "vt", "--lengths", "400", "--haystack", path("few")}, 2, "--haystack: none"},
      {{"--tasks", "vt", "--lengths", "400", "--word-list", path("few")}, 2, "--word-list: cwe"},
      {{"--tasks", "vt,fwe", "--lengths", "400", "--depths", "0.5"}, 2, "--depths: none"},
      {{"--tasks", "cwe", "--lengths", "400", "--word-list", path("few")}, 4, "3 different words"},
      {{"--tasks", "needle_local_uuid", "--lengths", "400", "--haystack", path("none")}, 4, "none"},
  };
  for (const auto& [arguments, code, message] : bad) {
    EXPECT_EQ(evaluate(arguments), code) << output_;
    EXPECT_NE(output_.find(message), std::string::npos) << output_;
  }

  // Learned positions end somewhere.
  ASSERT_EQ(run(training("short", {"--stages.0.length=6 steps", "--stages.1.length=1 steps",
                                   "--model.position=learned", "--model.max_positions=256"})),
            0)
      << output_;
  const auto of_short = [&](const std::string& lengths) {
    return run({"eval", "--checkpoint", path("short"), "--device", "cpu", "--tasks", "passkey",
                "--samples", "1", "--lengths", lengths});
  };
  EXPECT_EQ(of_short("256"), 0) << output_;
  EXPECT_EQ(of_short("256,257"), 3) << output_;
  EXPECT_NE(output_.find("257 tokens are more than the model's 256 learned positions"),
            std::string::npos)
      << output_;
}

// An evaluation that is killed in a long length leaves what it knew by then.
TEST_F(SystemTest, KeepsTheTasksThatWereAnsweredBeforeItEnded) {
  ASSERT_EQ(run(training("run", {"--stages.0.length=6 steps", "--stages.1.length=1 steps"})), 0)
      << output_;
  const std::string file = path("tasks.json");
  Process process(command({"eval", "--checkpoint", path("run"), "--device", "cpu", "--tasks",
                           "niah_single_1,passkey", "--lengths", "700,100000", "--samples", "8",
                           "--slots", "1", "--json", file}),
                  folder_ / "log", environment_);
  while (process.running() && !fs::exists(file)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  process.signal(SIGKILL);
  ASSERT_EQ(process.wait(), 128 + SIGKILL) << process.output();
  const nlohmann::json known = nlohmann::json::parse(read_file(file));
  ASSERT_EQ(known.at("tasks").size(), 1U);
  ASSERT_EQ(known.at("tasks").at(0).at("lengths").size(), 1U);
  EXPECT_EQ(known.at("tasks").at(0).at("lengths").at(0).at("results").size(), 8U);
  EXPECT_NE(process.output().find("niah_single_1"), std::string::npos) << process.output();
}

// A model that has read one prompt with its answer, many times, knows the answer.
TEST_F(SystemTest, FindsTheAnswerThatItHasLearned) {
  const Tokenizer tokenizer(path("tokenizer.model"));
  const TextTask task({.kind = TextTaskKind::kPasskey},
                      [&](const std::string& text) { return tokenizer.encode(text); });
  constexpr int64_t kLength = 384;
  const TextSample sample = task.sample(kLength, 0);
  const auto samples = [&](const std::string& length) {
    return run({"data", "tasks", "--tasks", "passkey", "--lengths", length, "--samples", "1",
                "--seed", "42", "--tokenizer", path("tokenizer.model"), "--output",
                path("sample.jsonl")});
  };
  EXPECT_EQ(samples("100"), 2);
  EXPECT_NE(output_.find("--lengths: 100: passkey needs"), std::string::npos) << output_;
  ASSERT_EQ(samples(std::to_string(kLength)), 0) << output_;
  const std::string line = read_file(path("sample.jsonl"));
  EXPECT_EQ(nlohmann::json::parse(line).at("text"),
            tokenizer.decode(sample.prompt) + " " + sample.answers.front() + ".");
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += line;
  write_file(path("learn.jsonl"), lines);
  ASSERT_EQ(run({"prepare", "--input", path("learn.jsonl"), "--tokenizer", path("tokenizer.model"),
                 "--output", path("learn.h5")}),
            0)
      << output_;
  write_file(path("learn.yaml"), R"(
name: learned
device: cpu
model: {layers: 2, width: 32, inner: 44, heads: 2, vocab: 400}
train: {sequence_length: 384, micro_batch: 2, batch: 2, lr: 1e-2}
data:
  sources: [{path: )" + path("learn.h5") +
                                     R"(}]
  tokenizer: )" + path("tokenizer.model") +
                                     R"(
stages: [{name: learn, length: 150 steps}]
)");
  ASSERT_EQ(run({"--config", path("learn.yaml"), "--out", path("learned")}), 0) << output_;
  ASSERT_EQ(run({"eval", "--checkpoint", path("learned"), "--device", "cpu", "--tasks", "passkey",
                 "--lengths", std::to_string(kLength), "--samples", "2", "--json"}),
            0)
      << output_;
  const nlohmann::json result = printed_json(output_).at("tasks").at(0).at("lengths").at(0);
  EXPECT_EQ(result.at("results").at(0).at("tokens"), sample.prompt.size());
  EXPECT_EQ(result.at("results").at(0).at("score"), 1) << result;
  EXPECT_EQ(result.at("results").at(1).at("score"), 0) << result;  // another key
}

TEST_F(SystemTest, ShowsItsAttention) {
  ASSERT_EQ(run(training("run", {"--model.attention={type: stickbreaking, remainder: value}"})), 0)
      << output_;
  const std::vector<std::string> evaluate = {"eval", "--checkpoint", path("run"), "--device",
                                             "cpu"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = evaluate;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  ASSERT_EQ(with({"--attention-maps", path("maps"), "--text", "The kernel is the kernel"}), 0)
      << output_;
  const nlohmann::json header = nlohmann::json::parse(read_file(path("maps/maps.json")));
  const size_t tokens = header.at("tokens").size();
  ASSERT_GT(tokens, 3U);
  ASSERT_EQ(header.at("maps").size(), 4U);  // two layers of two heads
  for (const nlohmann::json& map : header.at("maps")) {
    EXPECT_EQ(map.at("module"), "stickbreaking");
    ASSERT_EQ(map.at("remainder"), true);
    const std::string bytes = read_file(path("maps/") + map.at("file").get<std::string>());
    ASSERT_EQ(bytes.size(), 4 * (tokens * tokens + tokens));
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    EXPECT_EQ(values[tokens * tokens], 1);  // the first token sees nothing
    for (size_t j = 0; j < tokens; ++j) {
      const auto row = values.begin() + static_cast<int64_t>(j * tokens);
      EXPECT_NEAR(std::accumulate(row, row + static_cast<int64_t>(tokens), 0.0),
                  1 - values[tokens * tokens + j], 1e-5);
    }
  }

  write_file(path("truth.json"),
             R"({"examples": [{"tokens": [5, 6, 7, 5], "positions": [[1, 0], [3, 0]]},
                              {"tokens": [9, 8], "positions": [[1, 0]]}]})");
  ASSERT_EQ(with({"--true-positions", path("truth.json"), "--json"}), 0) << output_;
  const nlohmann::json overlap = printed_json(output_);
  EXPECT_EQ(overlap.at("examples"), 2);
  ASSERT_EQ(overlap.at("heads").size(), 4U);
  for (const nlohmann::json& head : overlap.at("heads")) {
    EXPECT_EQ(head.at("queries"), 3);
    EXPECT_GE(head.at("iou_top"), 0.2);  // in both examples token 1 sees only token 0
    EXPECT_LE(head.at("iou_top"), 1);
  }
  std::string many = "1";
  for (int i = 0; i < 4096; ++i) many += ",1";
  EXPECT_EQ(with({"--attention-maps", path("maps"), "--token-ids", many}), 2);
  EXPECT_NE(output_.find("4097 tokens, an attention map takes 1 to 4096"), std::string::npos)
      << output_;
}

TEST_F(SystemTest, RepeatedRunsAreEqual) {
  ASSERT_EQ(run(training("a")), 0) << output_;
  ASSERT_EQ(run(training("b")), 0) << output_;
  expect_equal_runs("a", "b");
}

TEST_F(SystemTest, RecomputingChangesNothing) {
  ASSERT_EQ(run(training("a")), 0) << output_;
  ASSERT_EQ(run(training("b", {"--train.recompute=full"})), 0) << output_;
  expect_equal_runs("a", "b");
}

// The weights that a benchmark draws stay as they are, whatever the rate: all of its steps read the
// same keys.
TEST_F(SystemTest, BenchTrainSaysWhatShareOfTheKeysIsRead) {
  const auto bench = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench",
                                          "train",
                                          "--config",
                                          path("config.yaml"),
                                          "--json",
                                          "--steps=2",
                                          "--warmup=1",
                                          "--model.init_std=0.02",
                                          "--train.sequence_length=512"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run(arguments), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{')));
  };
  const std::string skipping = "--model.attention.skip_epsilon=1e-30";
  const nlohmann::json some = bench({skipping});
  EXPECT_GT(some.at("keys_read"), 0.1);
  EXPECT_LT(some.at("keys_read"), 0.9);
  EXPECT_FALSE(some.contains("host_bytes"));
  EXPECT_EQ(bench({skipping, "--train.lr=1"}).at("keys_read"), some.at("keys_read"));
  EXPECT_EQ(bench({"--model.attention.skip_epsilon=0"}).at("keys_read"), 1);
  EXPECT_FALSE(bench({"--model.attention.type=softmax"}).contains("keys_read"));
  const nlohmann::json offload =
      bench({skipping, "--train.recompute=full", "--train.offload=activations"});
  EXPECT_EQ(offload.at("host_bytes"), 2 * 512 * 32 * sizeof(float));
  EXPECT_EQ(offload.at("keys_read"), some.at("keys_read"));
}

TEST_F(SystemTest, BenchTrainTellsCastsFromAttention) {
  for (const bool fp8 : {false, true}) {
    ASSERT_EQ(run({"bench", "train", "--config", path("config.yaml"), "--json", "--steps=1",
                   fp8 ? "--train.precision=fp8" : "--train.precision=bf16"}),
              0)
        << output_;
    const nlohmann::json parts =
        nlohmann::json::parse(output_.substr(output_.find('{'))).at("parts");
    EXPECT_EQ(parts.contains("casts to fp8"), fp8) << parts;
  }
}

// Where activations are is no part of a checkpoint: a run may be continued with or without.
TEST_F(SystemTest, OffloadingChangesNothing) {
  const std::vector<std::string> offload = {"--train.recompute=full",
                                            "--train.offload=activations"};
  ASSERT_EQ(run(training("whole")), 0) << output_;
  ASSERT_EQ(run(training("offloaded", offload)), 0) << output_;
  expect_equal_runs("whole", "offloaded");
  EXPECT_EQ(run_and_signal("parts", 7, {SIGTERM}, offload), 85) << output_;
  ASSERT_EQ(run(training("parts")), 0) << output_;
  expect_equal_runs("whole", "parts");
}

TEST_F(SystemTest, SignalsSaveAndTheRunContinues) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  int step = 7;
  for (const std::vector<int>& signals :
       std::vector<std::vector<int>>{{SIGTERM}, {SIGUSR1}, {SIGINT}, {SIGTERM, SIGTERM, SIGUSR1}}) {
    EXPECT_EQ(run_and_signal("parts", step, signals), 85) << output_;
    step = last_step("parts") + 6;  // in the second stage at the end
  }
  EXPECT_EQ(run_and_signal("parts", step, {SIGUSR2}), 0) << output_;
  expect_equal_runs("whole", "parts");
}

TEST_F(SystemTest, SavesOnRequestAndGoesOn) {
  EXPECT_EQ(
      run_and_signal("run", 3, {SIGUSR2}, {"--checkpoint.every=0 steps", "--checkpoint.keep=5"}), 0)
      << output_;
  int folders = 0;
  for (const auto& entry : fs::directory_iterator(path("run") + "/checkpoints")) {
    folders += entry.is_directory();
  }
  EXPECT_EQ(folders, 2);  // the request's and the last one
}

// A run that is killed at random moments, in training and in saving, always continues from a good
// checkpoint and ends with the same results as an uninterrupted run.
TEST_F(SystemTest, SurvivesKillAtRandomMoments) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  const std::vector<std::string> often = {"--checkpoint.every=2 steps"};
  std::mt19937 random(1);
  const char* wanted = std::getenv("TEST_KILLS");  // more kills, for a long run by hand
  const int enough = wanted ? std::atoi(wanted) : 20;
  int kills = 0;
  for (int attempt = 0; kills < enough && attempt < 10 * enough; ++attempt) {
    // Each round starts where the last one was killed; a finished run starts over.
    Process process(command(training("killed", often)), folder_ / "log", environment_);
    const auto delay = std::uniform_int_distribution<int>(5, 600)(random);
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    process.signal(SIGKILL);
    const int code = process.wait();
    if (code == 0) {
      expect_equal_runs("whole", "killed");
      fs::remove_all(path("killed"));
    } else {
      ASSERT_EQ(code, 128 + SIGKILL) << process.output();
      ++kills;
    }
  }
  EXPECT_EQ(kills, enough);
  ASSERT_EQ(run(training("killed", often)), 0) << output_;
  expect_equal_runs("whole", "killed");
}

TEST_F(SystemTest, DamagedCheckpointsAreRefusedAndOlderOnesTaken) {
  ASSERT_EQ(run(training("whole")), 0) << output_;
  ASSERT_EQ(run_and_signal("run", 33, {SIGTERM}), 85) << output_;
  const fs::path shard = newest("run") / "rank-00000-of-00001.safetensors";
  std::string bytes = read_file(shard);
  bytes[bytes.size() / 2] ^= 1;
  write_file(shard, bytes);
  ASSERT_EQ(run(training("run")), 0) << output_;
  EXPECT_NE(output_.find(shard.filename().string()), std::string::npos) << output_;
  expect_equal_runs("whole", "run");

  for (const auto& entry : fs::recursive_directory_iterator(path("run") + "/checkpoints")) {
    if (entry.path().filename() == "manifest.json") fs::resize_file(entry.path(), 10);
  }
  EXPECT_EQ(run(training("run")), 5) << output_;
}

TEST_F(SystemTest, AnotherModelCannotContinueTheRun) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  EXPECT_EQ(run(training("run", {"--seed=4", "--model.norm_eps=1e-6"})), 3);
  EXPECT_NE(output_.find("seed: 3 in the checkpoint, 4 now"), std::string::npos) << output_;
  EXPECT_NE(output_.find("model.norm_eps"), std::string::npos) << output_;
  EXPECT_EQ(run(training("run",
                         {"--model.norm_eps=1e-6", "--checkpoint.allow_changes=[model.norm_eps]"})),
            0)
      << output_;
}

// Another optimizer only where that is allowed, with a message; an average of the weights at any
// time. `ckpt ls` says which checkpoint keeps what.
TEST_F(SystemTest, AnotherOptimizerIsAllowedAndAnAverageIsKept) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  EXPECT_EQ(run(training("run", {"--train.optimizer=muon"})), 3);
  EXPECT_NE(output_.find("train.optimizer: adamw in the checkpoint, muon now"), std::string::npos)
      << output_;
  const std::vector<std::string> muon = {"--train.optimizer=muon", "--train.ema=0.9",
                                         "--checkpoint.allow_changes=[train.optimizer]"};
  ASSERT_EQ(run(training("run", muon)), 0) << output_;
  EXPECT_NE(output_.find("was saved with the optimizer adamw, and the run goes on with muon: where "
                         "it has no muon_m, that begins with zeros"),
            std::string::npos)
      << output_;
  EXPECT_NE(output_.find("has no average of the weights (train.ema): it begins with them"),
            std::string::npos)
      << output_;

  const auto evaluated = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--device",
                                          "cpu",  "--tokens",     "512",       "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    EXPECT_EQ(run(arguments), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{')));
  };
  const nlohmann::json of_weights = evaluated({}), of_average = evaluated({"--ema"});
  EXPECT_NE(of_average.at("loss"), of_weights.at("loss"));
  EXPECT_FALSE(of_weights.contains("ema"));
  EXPECT_EQ(of_average.at("ema"), true);
  const auto exported = [&](const std::string& run_folder, const std::string& to,
                            const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"export", "--checkpoint", path(run_folder), "--output",
                                          path(to)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  ASSERT_EQ(exported("run", "weights", {}), 0) << output_;
  ASSERT_EQ(exported("run", "average", {"--ema"}), 0) << output_;
  EXPECT_NE(read_file(path("weights/model.safetensors")),
            read_file(path("average/model.safetensors")));
  // The run has validated the weights alone.
  const std::string card = read_file(path("average/README.md"));
  EXPECT_NE(read_file(path("weights/README.md")).find("| validation loss | "), std::string::npos);
  EXPECT_EQ(card.find("| validation loss | "), std::string::npos) << card;
  EXPECT_NE(card.find("| weights | a running average of the run's, of decay 0.9 |"),
            std::string::npos)
      << card;

  // Its newest checkpoint has no average any more. It is whole, so the older one, which has an
  // average, is not exported in its place.
  copy_run("run", "dropped", 50);
  ASSERT_EQ(run(training("dropped", {"--train.optimizer=muon"})), 0) << output_;
  EXPECT_EQ(run({"ckpt", "ls", path("dropped")}), 0) << output_;
  EXPECT_NE(output_.find("muon      ok        adam_m, adam_v, muon_m\n"), std::string::npos)
      << output_;
  EXPECT_NE(output_.find("muon      ok        adam_m, adam_v, ema, muon_m\n"), std::string::npos)
      << output_;
  EXPECT_EQ(exported("dropped", "none", {"--ema"}), 3) << output_;
  EXPECT_NE(output_.find("step-00000060: it has no average of the weights"), std::string::npos)
      << output_;
  EXPECT_FALSE(fs::exists(path("none")));
}

// Neither the records after the step that it would have gone back to nor the run's configuration
// and tokenizer are lost, and the order to go back stays to be obeyed.
TEST_F(SystemTest, AStartThatItsDataRefusesChangesNoFileOfTheRun) {
  ASSERT_EQ(run_and_signal("run", 12, {SIGTERM}), 85) << output_;
  const auto files = [&] {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::directory_iterator(path("run"))) {
      if (entry.is_regular_file()) contents[entry.path().filename()] = read_file(entry.path());
    }
    return contents;
  };
  const std::map<std::string, std::string> before = files();
  EXPECT_EQ(run(training("run", {"--checkpoint.resume=10", "--data.sources.0.weight=2"})), 3);
  EXPECT_NE(output_.find("data.sources.0.weight: 1 in the checkpoint, 2 now"), std::string::npos)
      << output_;
  EXPECT_EQ(files(), before);

  std::string bytes = read_file(path("a.h5"));
  bytes[bytes.size() - 99] ^= 1;
  write_file(path("a.h5"), bytes);
  EXPECT_EQ(run(training("run", {"--checkpoint.resume=none"})), 4) << output_;
  EXPECT_EQ(files(), before);
}

TEST_F(SystemTest, ASecondJobOnTheFolderIsRefused) {
  Process first(command(training("run", {"--stages.0.length=100000 steps"})), folder_ / "first",
                environment_);
  while (first.running() && last_step("run") < 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(run(training("run")), 2) << output_;
  const auto state = [&] {
    return nlohmann::json::parse(read_file(path("run") + "/status.json")).at("state");
  };
  EXPECT_EQ(state(), "running");  // the second start has not touched it
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 85) << first.output();
  EXPECT_EQ(state(), "stopped");
}

TEST_F(SystemTest, DivergenceEndsTheRunWithoutTouchingWeights) {
  EXPECT_EQ(run(training("run", {"--train.lr=1e30", "--stages.0.schedule.type=constant"})), 6)
      << output_;
  const auto status = nlohmann::json::parse(read_file(path("run") + "/status.json"));
  EXPECT_EQ(status.at("state"), "failed");
  EXPECT_EQ(status.at("exit_code"), 6);
  EXPECT_NE(output_.find(status.at("message").get<std::string>()), std::string::npos) << status;
}

TEST_F(SystemTest, DamagedDataIsRefused) {
  std::string bytes = read_file(path("a.h5"));
  bytes[bytes.size() / 2] ^= 4;
  write_file(path("a.h5"), bytes);
  EXPECT_EQ(run(training("run")), 4) << output_;
  EXPECT_NE(output_.find("a.h5"), std::string::npos) << output_;
  fs::resize_file(path("a.h5"), bytes.size() - 1);
  EXPECT_EQ(run(training("run")), 4) << output_;
}

TEST_F(SystemTest, FailedSavesEndTheRunOnlyWhenTheyRepeat) {
  // Files may grow to 40 blocks of 512 bytes: enough for metrics, not for a checkpoint.
  std::string shell = "ulimit -f 40; exec";
  for (const std::string& word : command(training("run"))) shell += " '" + word + "'";
  Process process({"bash", "-c", shell}, folder_ / "log", environment_);
  EXPECT_EQ(process.wait(), 9) << process.output();
  EXPECT_GE(last_step("run"), 20);  // the first failure did not end it
  for (const auto& entry : fs::directory_iterator(path("run") + "/checkpoints")) {
    ADD_FAILURE() << "left behind: " << entry.path();
  }
}

TEST_F(SystemTest, DryRunNeedsNoData) {
  EXPECT_EQ(run(training("run", {"--dry-run", "--data.sources=[{path: nowhere.h5}]"})), 0)
      << output_;
  EXPECT_NE(output_.find("parameters"), std::string::npos);
  EXPECT_NE(output_.find("attention         stickbreaking"), std::string::npos) << output_;
  EXPECT_NE(output_.find("missing           nowhere.h5"), std::string::npos) << output_;
  EXPECT_NE(output_.find("duration          not known"), std::string::npos) << output_;
  EXPECT_FALSE(fs::exists(path("run")));
  EXPECT_EQ(run(training("run", {"--dry-run", "--peak-tflops=0.5"})), 0) << output_;
  EXPECT_NE(output_.find("of 0.5 TFLOP/s"), std::string::npos) << output_;
}

}  // namespace
}  // namespace sbtrain
