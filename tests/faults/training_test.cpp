// Runs that diverge, are stopped, started again, moved away or given crafted states.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "checkpoint/manifest.h"
#include "core/sha256.h"
#include "faults/driver.h"

namespace sbtrain::test {
namespace {

using nlohmann::json;
class Training : public Faults {
 protected:
  std::string out() const { return path("run"); }

  // The shared run of 12 steps, whose checkpoints are of steps 8 and 12.
  void copy_trained() const { fs::copy(trained(), out(), fs::copy_options::recursive); }

  std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(out() + "/checkpoints")) {
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string newest() const {
    const std::string name = read_file(out() + "/checkpoints/latest");
    return out() + "/checkpoints/" + name.substr(0, name.find('\n'));
  }

  json state() const { return json::parse(read_file(newest() + "/state.json")); }

  // Records of metrics.jsonl without the values that depend on time.
  static std::vector<json> records(const std::string& run) {
    std::vector<json> result;
    if (!fs::exists(run + "/metrics.jsonl")) return result;
    std::istringstream lines(read_file(run + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      json record = json::parse(line, nullptr, false);
      if (record.is_discarded()) continue;  // the line that is being written
      for (const char* key : {"time", "train/tokens_per_second"}) record.erase(key);
      result.push_back(std::move(record));
    }
    return result;
  }

  static int64_t last_step(const std::string& run) { return last_recorded_step(run); }

  // Waits until the process is `ready`; one that has ended is not waited for.
  static void wait_for(Process& process, const std::function<bool()>& ready) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (process.running() && !ready()) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "the run did not get to where a signal was to meet it";
        return;
      }
    }
  }

  // Starts training, waits for `ready`, and sends the signal.
  int run_and_signal(const Arguments& more, int signal, const std::function<bool()>& ready) {
    return with_process(more, [&](Process& process) {
      wait_for(process, ready);
      process.signal(signal);
    });
  }
  int run_and_signal(const Arguments& more, int signal, int64_t step) {
    return run_and_signal(more, signal, [&] { return last_step(out()) >= step; });
  }
  template <typename Act>
  int with_process(const Arguments& more, Act&& act) {
    Arguments command = train(out(), more);
    command.insert(command.begin(), program());
    fs::remove(path("log"));
    Process process(command, path("log"),
                    {{"OMP_NUM_THREADS", "1"}, {"OMP_WAIT_POLICY", "passive"}});
    act(process);
    const int code = process.wait(60);
    text_ = process.output();
    return code;
  }
  // Whether the program of with_process has read its checkpoint. Before it reads its command line,
  // a signal ends it as it would end any program.
  bool resumed() const {
    return fs::exists(path("log")) &&
           read_file(path("log")).find("resumed from") != std::string::npos;
  }
  bool said(const std::string& text) const { return text_.find(text) != std::string::npos; }

  std::string text_;  // output of with_process
};

// Arguments that continue the shared run with a rate at which the first step destroys the weights.
std::vector<std::string> diverging(int steps, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments = {"--stages.0.length=" + std::to_string(steps) + " steps",
                                        "--train.lr=1e30"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// ---- divergence

TEST_F(Training, DivergenceLeavesAGoodCheckpoint) {
  copy_trained();
  ASSERT_EQ(run(train(out(), diverging(60, {"--checkpoint.every=1", "--checkpoint.keep=1"}))),
            kDiverged)
      << output();
  EXPECT_TRUE(says("last-good")) << output();
  // Step 13 destroyed the weights, which only the steps after it show. None of those is saved.
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step-00000012", "step-00000013"}));
  const Arguments healthy = {"--stages.0.length=20 steps", "--train.max_bad_steps=3"};
  EXPECT_EQ(run(train(out(), healthy)), kDiverged) << output();
  Arguments back = healthy;
  back.emplace_back("--checkpoint.resume=last-good");
  EXPECT_EQ(run(train(out(), back)), kDone) << output();
  EXPECT_TRUE(says("step-00000012 (step 12")) << output();
  EXPECT_EQ(last_step(out()), 20);
}

TEST_F(Training, GoesBackToAStepByItsNumber) {
  copy_trained();
  EXPECT_EQ(run(train(out(), {"--stages.0.length=14 steps", "--resume=8"})), kDone) << output();
  EXPECT_TRUE(says("step-00000008 (step 8")) << output();
  EXPECT_EQ(run(train(out(), {"--stages.0.length=14 steps", "--resume=9"})), kNoCheckpoint);
  EXPECT_TRUE(says("step-00000009: there is no such checkpoint; `sbtrain ckpt ls " + out() + "`"))
      << output();
}

TEST_F(Training, ARunThatEndsInNanHasFailed) {
  copy_trained();
  for (int start = 0; start < 2; ++start) {  // the second one continues from step 12 as well
    EXPECT_EQ(run(train(out(), diverging(15))), kDiverged) << output();
    EXPECT_TRUE(says("the last 2 of 15 steps were skipped")) << output();
    EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step-00000008", "step-00000012"}));
  }
}

// A stop must not wait for a step that can be applied; the state that it saves says what it is.
TEST_F(Training, AStopAmongSkippedStepsSavesAndCountsOn) {
  copy_trained();
  const Arguments more = diverging(100000, {"--train.max_bad_steps=90000"});
  ASSERT_EQ(run_and_signal(more, SIGTERM, int64_t{20}), kStopped) << text_;
  EXPECT_GE(state().at("skipped_in_a_row"), 7);
  EXPECT_EQ(state().at("updates"), 13);
  EXPECT_TRUE(fs::exists(out() + "/checkpoints/step-00000012"));
  const auto stopped = state().at("step").get<int64_t>();
  EXPECT_EQ(run(train(out(), diverging(100000, {"--train.max_bad_steps=" +
                                                std::to_string(stopped - 13 + 5)}))),
            kDiverged);
  EXPECT_TRUE(says("step " + std::to_string(stopped + 5))) << output();
}

// ---- spikes

std::vector<std::string> spiky(const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments = {"--stages.0.length=60 steps", "--train.spike_sigma=0.3",
                                        "--train.spike_window=5", "--train.max_bad_steps=1000"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST_F(Training, SpikesAreSkippedAlikeAfterAStop) {
  ASSERT_EQ(run(train(path("whole"), spiky())), kDone) << output();
  const std::string end = read_file(path("whole") + "/checkpoints/step-00000060/state.json");
  const int spikes = json::parse(end).at("spike_steps");
  EXPECT_GT(spikes, 3);
  EXPECT_LT(spikes, 55);
  EXPECT_TRUE(says("is a spike (running mean")) << output();
  for (int64_t step = 7; step < 50; step = last_step(out()) + 9) {
    const int code = run_and_signal(spiky(), SIGTERM, step);
    ASSERT_TRUE(code == kStopped || code == kDone) << text_;
    if (code == kDone) break;
  }
  ASSERT_EQ(run(train(out(), spiky())), kDone) << output();
  EXPECT_EQ(records(out()), records(path("whole")));
  EXPECT_EQ(read_file(newest() + "/state.json"), end);
}

TEST_F(Training, NothingIsSavedWhileStepsAreSkipped) {
  ASSERT_EQ(run(train(out(), spiky({"--checkpoint.every=1", "--checkpoint.keep=1000"}))), kDone)
      << output();
  int saved = 0;
  for (const std::string& name : checkpoints()) {
    const json saved_state = json::parse(read_file(out() + "/checkpoints/" + name + "/state.json"));
    ++saved;
    if (saved_state.at("step") == 60) continue;  // the end of the run
    EXPECT_EQ(saved_state.at("skipped_in_a_row"), 0) << name;
  }
  EXPECT_GE(saved, state().at("updates").get<int>());
  EXPECT_LT(saved, 60);
}

// ---- starting again

TEST_F(Training, TheSameCommandContinuesWhatItBegan) {
  copy_trained();
  for (const std::string& resume :
       {std::string("none"), trained() + "/checkpoints/step-00000008", std::string("8")}) {
    const Arguments order = {"--checkpoint.resume=" + resume, "--stages.0.length=60 steps",
                             "--checkpoint.every=8", "--checkpoint.keep=100"};
    const int64_t first = resume == "none" ? 0 : 8;
    int64_t reached = first;
    while (reached < 45) {
      const std::string latest = read_file(out() + "/checkpoints/latest");
      const int code = run_and_signal(
          order, SIGTERM, [&] { return read_file(out() + "/checkpoints/latest") != latest; });
      if (code == kDone) break;
      ASSERT_EQ(code, kStopped) << text_;
      const bool continued = said("this command has begun already");
      EXPECT_EQ(continued, reached > first) << resume << text_;
      ASSERT_GT(state().at("step").get<int64_t>(), reached);
      reached = state().at("step").get<int64_t>();
    }
    ASSERT_EQ(run(train(out(), order)), kDone) << output();
    // Complete: the order counts again.
    EXPECT_EQ(run_and_signal(order, SIGTERM, [&] { return fs::exists(out() + "/start.json"); }),
              kStopped)
        << text_;
    EXPECT_FALSE(said("this command has begun already")) << text_;
    // So it does for another command.
    Arguments other = order;
    other.emplace_back("--train.lr=1e-3");
    EXPECT_EQ(run(train(out(), other)), kDone) << output();
    EXPECT_FALSE(says("this command has begun already")) << output();
  }
}

TEST_F(Training, AKilledStartWithAnOrderContinuesToo) {
  copy_trained();
  const Arguments order = {"--checkpoint.resume=none", "--stages.0.length=100000 steps",
                           "--checkpoint.every=2"};
  ASSERT_EQ(run_and_signal(order, SIGKILL,
                           [&] { return last_step(out()) >= 10 && state().at("step") != 12; }),
            128 + SIGKILL);
  EXPECT_EQ(run_and_signal(order, SIGTERM, [&] { return resumed(); }), kStopped) << text_;
  EXPECT_TRUE(said("this command has begun already")) << text_;
}

TEST_F(Training, ALengthenedStageSaysThatTheRateChanges) {
  const Arguments cosine = {"--stages.0.schedule.type=cosine"};
  Arguments shorter = cosine;
  shorter.emplace_back("--stages.0.length=10 steps");
  ASSERT_EQ(run(train(out(), shorter)), kDone) << output();
  EXPECT_FALSE(says("learning rate")) << output();
  Arguments longer = cosine;
  longer.emplace_back("--stages.0.length=20 steps");
  ASSERT_EQ(run(train(out(), longer)), kDone) << output();
  // Of 3e-3, the tenth step of 10 has (1 + cos(0.9 pi)) / 2 and that of 20 (1 + cos(0.45 pi)) / 2.
  EXPECT_TRUE(says("step 10 had learning rate 7.34e-05, where the present schedule has 0.00173"))
      << output();
}

// ---- signals

// From the moment at which the run folder is taken, a signal has its meaning.
TEST_F(Training, SignalsBeforeTheFirstStepSave) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT, SIGUSR2}) {
    for (int i = 0; i < rounds(4); ++i) {
      fs::remove_all(out());
      const int code = run_and_signal({}, signal, [&] { return fs::exists(out() + "/lock"); });
      EXPECT_EQ(code, signal == SIGUSR2 ? kDone : kStopped) << signal << text_;
      EXPECT_FALSE(checkpoints().empty());
    }
  }
  EXPECT_EQ(run(train(out())), kDone) << output();
}

TEST_F(Training, SignalsBeforeMainAreKept) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime must be the first library";
  const std::string preload = std::string("export LD_PRELOAD=") + SBTRAIN_EARLY_SIGNAL;
  EXPECT_EQ(run_in(preload, train(out(), {"--stages.0.length=1000000 steps"})), kStopped)
      << output();
  EXPECT_EQ(checkpoints(), std::vector<std::string>{"step-00000000"});
  // Where there is nothing to save, a stop ends the program.
  EXPECT_EQ(run_in(preload, {"config", "docs"}), 128 + SIGTERM) << output();
}

// Unless the environment says how long threads spin, the program starts itself again.
TEST_F(Training, TheProcessIsCalledAsTheProgram) {
  Arguments command = {"env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT", program()};
  for (const std::string& word : train(out(), {"--stages.0.length=1000000 steps"})) {
    command.push_back(word);
  }
  Process process(command, path("log"));
  wait_for(process, [&] { return last_step(out()) >= 1; });
  const std::string lock = read_file(out() + "/lock");  // "pid 123 on host NAME"
  const std::string pid = lock.substr(4, lock.find(" on ") - 4);
  EXPECT_EQ(read_file("/proc/" + pid + "/comm"), fs::path(program()).filename().string() + "\n");
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(60), kStopped) << process.output();
}

TEST_F(Training, AStopEndsValidationWhichIsMadeUpFor) {
  // Thousands of batches, before the first step, after step 1, and at the end.
  const Arguments slow = {"--data.validation=[" + store() + "]", "--validation.tokens=200000",
                          "--validation.every=1", "--stages.0.length=2 steps"};
  ASSERT_EQ(run(train(path("whole"), slow)), kDone) << output();
  int stops = 0;
  for (int start = 0; start < 100; ++start) {
    const std::vector<json> before = records(out());
    // Every other start may finish a validation, so that the run gets on.
    const int code = run_and_signal(slow, SIGTERM, [&] {
      return (start == 0 ? fs::exists(out() + "/run.json") : resumed()) &&
             (start % 2 == 0 || records(out()).size() > before.size());
    });
    if (code == kDone) break;
    ASSERT_EQ(code, kStopped) << text_;
    stops += state().at("validation_due").get<bool>() ? 1 : 0;
  }
  EXPECT_GE(stops, 2);
  ASSERT_EQ(run(train(out(), slow)), kDone) << output();
  EXPECT_EQ(records(out()), records(path("whole")));
}

// ---- the run folder

TEST_F(Training, AFolderThatIsMovedEndsTheRun) {
  for (const bool removed : {false, true}) {
    for (const Arguments& more : {Arguments{}, Arguments{"--checkpoint.every=1"}}) {
      fs::remove_all(path("moved"));
      Arguments endless = {"--stages.0.length=1000000 steps"};
      endless.insert(endless.end(), more.begin(), more.end());
      const int code = with_process(endless, [&](Process& process) {
        wait_for(process, [&] { return last_step(out()) >= 4; });
        fs::rename(out(), path("moved"));
        if (removed) fs::remove_all(path("moved"));
      });
      EXPECT_EQ(code, kStorage) << text_;
      EXPECT_TRUE(said("moved or removed")) << text_;
      EXPECT_FALSE(fs::exists(out()));
    }
  }
}

// ---- crafted states

// Replaces a text file of a checkpoint, and makes its manifest fit again.
void craft_text(const std::string& checkpoint, const std::string& name, const std::string& text) {
  Manifest manifest = read_manifest(checkpoint);
  for (ManifestFile& file : manifest.files) {
    if (file.name != name) continue;
    file.bytes = text.size();
    file.sha256 = sha256_hex(text);
  }
  write_file(checkpoint + "/" + name, text);
  write_file(checkpoint + "/manifest.json", format_manifest(manifest));
}

TEST_F(Training, CraftedStatesAreRefusedByName) {
  const json good = json::parse(read_file(trained() + "/checkpoints/step-00000012/state.json"));
  const auto refused = [&](const std::string& named, const json& crafted) {
    fs::remove_all(out());
    copy_trained();
    craft_text(newest(), "state.json", crafted.dump());
    EXPECT_EQ(run(train(out(), {"--stages.0.length=14 steps"})), kNoCheckpoint) << output();
    EXPECT_TRUE(says("state.json") && says(named)) << named << output();
  };
  json loader = json::parse(good.at("loader").get<std::string>());
  for (const int64_t micro : {int64_t{-1}, INT64_MAX}) {
    json crafted = good;
    loader["micro"] = micro;
    crafted["loader"] = loader.dump();
    refused("micro is", crafted);
  }
  json negative = good;
  negative["step"] = -5;
  refused("step is -5", negative);
  json other = good;
  other["step"] = 11;
  other["updates"] = 11;
  other["loss_count"] = 11;
  loader["micro"] = 0;
  loader["step"] = 11;
  other["loader"] = loader.dump();
  refused("the manifest has step 12", other);
}

// A run of a program that did not have the key yet.
TEST_F(Training, AKeyThatIsYoungerThanTheCheckpointHasItsDefault) {
  for (const auto& [head_dim, code] : {std::pair{"0", kDone}, std::pair{"8", kConfig}}) {
    fs::remove_all(out());
    copy_trained();
    std::string config;
    std::istringstream lines(read_file(newest() + "/config.yaml"));
    for (std::string line; std::getline(lines, line);) {
      if (line.find("head_dim") == std::string::npos) config += line + "\n";
    }
    craft_text(newest(), "config.yaml", config);
    Manifest manifest = read_manifest(newest());
    ASSERT_EQ(manifest.fingerprints.erase("model.head_dim"), 1U);
    write_file(newest() + "/manifest.json", format_manifest(manifest));
    EXPECT_EQ(run(train(out(), {"--stages.0.length=14 steps",
                                std::string("--model.head_dim=") + head_dim})),
              code)
        << output();
  }
}

TEST_F(Training, ACraftedSequenceHidesNoNewSave) {
  copy_trained();
  Manifest manifest = read_manifest(newest());
  manifest.sequence = INT64_MAX;
  write_file(newest() + "/manifest.json", format_manifest(manifest));
  EXPECT_EQ(run(train(out(), {"--stages.0.length=20 steps"})), kDone) << output();
  EXPECT_TRUE(says("sequence is 9223372036854775807")) << output();
  EXPECT_EQ(state().at("step"), 20);
}

}  // namespace
}  // namespace sbtrain::test
