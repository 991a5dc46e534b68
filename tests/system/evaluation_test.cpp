// Evaluations and benchmarks by the program: losses by length, tasks, attention, the cache, speed.
#include <chrono>
#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>
#include <tuple>

#include "eval/text_task.h"
#include "runs.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using test::Process;
using test::read_file;
using test::SystemTest;
using test::write_file;

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
    EXPECT_EQ(layer.at("hops").at("2"), 1);
    EXPECT_GE(layer.at("hops").at("8"), layer.at("hops").at("4"));
    EXPECT_EQ(layer.at("queries_beyond_eighths").size(), 8U);
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

// It has one row for each length, and the loss of `sbtrain eval`.
TEST_F(SystemTest, BenchSkipMeasuresAModelThatSkipsNothing) {
  ASSERT_EQ(run(training("run", {"--model.attention.type=softmax"})), 0) << output_;
  const std::vector<std::string> bench = {
      "bench",     "skip", "--checkpoint", path("run"), "--device", "cpu", "--lengths", "32",
      "--batches", "2",    "--repeats",    "1",         "--tokens", "64"};
  ASSERT_EQ(run(bench), 0) << output_;
  EXPECT_EQ(output_.find('%'), std::string::npos) << output_;
  std::vector<std::string> with_json = bench;
  with_json.emplace_back("--json");
  ASSERT_EQ(run(with_json), 0) << output_;
  const nlohmann::json row = printed_json(output_);  // there is no second one
  EXPECT_EQ(row.at("epsilon"), 0);
  EXPECT_TRUE(row.at("keys_read").is_null());
  EXPECT_GT(row.at("attention_forward_seconds"), 0);
  EXPECT_GT(row.at("attention_backward_seconds"), 0);
  ASSERT_EQ(run({"eval", "--checkpoint", path("run"), "--device", "cpu", "--lengths", "32",
                 "--tokens-per-length", "128", "--json", "-"}),
            0)
      << output_;
  EXPECT_NEAR(row.at("loss"), printed_json(output_).at("lengths").at(0).at("loss"), 1e-6);
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

// What a step of a trained model costs on the text of its run, where sticks end elsewhere than with
// random weights and tokens.
TEST_F(SystemTest, BenchTrainTakesTheWeightsAndTheTextOfARun) {
  write_file(path("long.txt"), read_file(SBTRAIN_TEST_TEXT));  // a single document
  ASSERT_EQ(run({"prepare", "--tokenizer", path("tokenizer.model"), "--input", path("long.txt"),
                 "--output", path("long.h5")}),
            0)
      << output_;
  const std::vector<std::string> long_rows = {"--model.attention.skip_epsilon=1e-30",
                                              "--model.init_std=0.02",
                                              "--train.sequence_length=512",
                                              "--train.micro_batch=1",
                                              "--train.batch=1",
                                              "--data.sources=[{path: " + path("long.h5") + "}]"};
  std::vector<std::string> fast = long_rows;
  fast.emplace_back("--train.lr=3e-2");
  ASSERT_EQ(run(training("run", fast)), 0) << output_;
  const auto bench = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench",  "train",     "--config",  path("config.yaml"),
                                          "--json", "--steps=1", "--warmup=1"};
    arguments.insert(arguments.end(), long_rows.begin(), long_rows.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const auto keys_read = [&](const std::vector<std::string>& more) {
    EXPECT_EQ(bench(more), 0) << output_;
    return nlohmann::json::parse(output_.substr(output_.find('{'))).at("keys_read").get<double>();
  };
  const double of_run = keys_read({"--init-from", path("run")});
  EXPECT_NE(output_.find("the weights are those of"), std::string::npos) << output_;
  EXPECT_NE(of_run, keys_read({}));
  EXPECT_EQ(of_run, keys_read({"--init-from", path("run"), "--train.lr=1"}));
  const std::string other = "--data.sources=[{path: " + path("a.h5") + "}]";
  EXPECT_NE(of_run, keys_read({"--init-from", path("run"), other})) << "other documents";
  EXPECT_FALSE(fs::exists(path("run/init_from.json")));

  EXPECT_EQ(bench({"--init-from", path("run"), "--model.layers=3"}), 3) << output_;
  EXPECT_EQ(bench({"--init-from", path("none")}), 5) << output_;
  EXPECT_EQ(bench({"--init-from", path("run"), "--data.sources=[{path: none.h5}]"}), 4) << output_;
  EXPECT_NE(output_.find("none.h5"), std::string::npos) << output_;
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

}  // namespace
}  // namespace sbtrain
