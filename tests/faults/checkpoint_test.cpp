// Checkpoints with false contents under valid seals, and checkpoints of a run that is still going.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/sha256.h"
#include "faults/driver.h"

namespace sbtrain::test {
namespace {

std::string sha256_of(const std::string& text) {
  return sha256_hex(text);
}

class Checkpoints : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    fs::copy(trained(), path("run"), fs::copy_options::recursive);
    fs::remove_all(step("00000008"));
  }
  std::string step(const std::string& number) const {
    return path("run/checkpoints/step-" + number);
  }
  std::string folder() const { return step("00000012"); }

  using Edit = std::function<void(std::string&)>;
  // Edits manifest.json and makes its seal fit again.
  void craft_manifest(const Edit& edit) const {
    const std::string file = folder() + "/manifest.json";
    const std::string open = ",\n\"sha256\": \"";
    std::string body = read_file(file);
    body.resize(body.rfind(open));
    edit(body);
    write_file(file, body + open + sha256_of(body) + "\"\n}\n");
  }
  // Edits a file, and the manifest's entry for it.
  void craft_file(const std::string& name, const Edit& edit) const {
    const std::string before = read_file(folder() + "/" + name);
    std::string after = before;
    edit(after);
    ASSERT_NE(before, after) << name;
    write_file(folder() + "/" + name, after);
    craft_manifest([&](std::string& manifest) {
      replace(manifest, sha256_of(before), sha256_of(after));
      const size_t entry = manifest.find("\"name\": \"" + name + "\"");
      const std::string bytes = "\"bytes\": " + std::to_string(before.size());
      manifest.replace(manifest.find(bytes, entry), bytes.size(),
                       "\"bytes\": " + std::to_string(after.size()));
    });
  }
  static void replace(std::string& text, const std::string& what, const std::string& by) {
    const size_t at = text.find(what);
    ASSERT_NE(at, std::string::npos) << what;
    text.replace(at, what.size(), by);
  }
  // "KEY": {...} of the tensor in a manifest.
  static std::string entry_of(const std::string& manifest, const std::string& key) {
    const size_t begin = manifest.find("\"" + key + "\": {");
    return manifest.substr(begin, manifest.find('}', begin) + 1 - begin);
  }

  void expect_bad(const std::string& what) {
    EXPECT_EQ(run({"ckpt", "verify", path("run")}), kNoCheckpoint) << output();
    EXPECT_TRUE(says(what) && says("bad: ")) << what << "\n" << output();
  }
};

TEST_F(Checkpoints, AreGoodWhenOnlyTheSealIsMadeAgain) {
  craft_manifest([](std::string&) {});
  EXPECT_EQ(run({"ckpt", "verify", path("run")}), 0) << output();
}

TEST_F(Checkpoints, WithATensorTwiceAreRefused) {
  const std::string key = "model/model.norm.weight";
  craft_manifest([&](std::string& manifest) {
    const std::string entry = entry_of(manifest, key);
    replace(manifest, entry, entry + ",\n  " + entry);
  });
  expect_bad(key);
  EXPECT_TRUE(says("twice")) << output();
  EXPECT_EQ(run(generate({"--checkpoint", path("run")})), kNoCheckpoint) << output();
}

TEST_F(Checkpoints, WithAShardTwiceAreRefused) {
  craft_manifest([&](std::string& manifest) {
    const size_t begin = manifest.find("{\"name\": \"rank-");
    const std::string entry = manifest.substr(begin, manifest.find("}}}", begin) + 3 - begin);
    replace(manifest, entry, entry + ",\n" + entry);
  });
  expect_bad("rank-00000-of-00001.safetensors twice");
}

TEST_F(Checkpoints, WithAnotherHashOfATensorAreRefused) {
  craft_manifest([&](std::string& manifest) {
    const size_t hash = manifest.find("\"sha256\"", manifest.find("\"model/model.norm.weight\""));
    const size_t digit = manifest.find_first_of("0123456789abcdef", hash + 9);
    manifest[digit] = manifest[digit] == '0' ? '1' : '0';
  });
  expect_bad("model/model.norm.weight");
}

TEST_F(Checkpoints, OfAnotherModelThanTheirConfigurationAreRefused) {
  craft_file("config.yaml", [](std::string& text) { replace(text, "layers: 1\n", "layers: 2\n"); });
  expect_bad("model.layers.1.");
  EXPECT_TRUE(says("is missing")) << output();
  craft_file("config.yaml", [](std::string& text) {
    replace(text, "layers: 2\n", "layers: 1\n");
    replace(text, "inner: 24\n", "inner: 32\n");
  });
  expect_bad("has shape [");
  craft_file("config.yaml", [](std::string& text) { text = "model: [\n"; });
  expect_bad("config.yaml");
}

TEST_F(Checkpoints, WithAFalseStateAreRefused) {
  const std::string good = read_file(folder() + "/state.json");
  const std::vector<std::string> bad = {"", "{", "[]", "{\"step\": 12}",
                                        nlohmann::json::parse(good).dump().replace(0, 1, "{{")};
  std::vector<std::string> states = bad;
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, nlohmann::json>>{{"step", 11},
                                                           {"step", "x"},
                                                           {"tokens", 700},
                                                           {"tokens", nullptr},
                                                           {"loader", "{"},
                                                           {"loader", "[1]"}}) {
    nlohmann::json state = nlohmann::json::parse(good);
    state[key] = value;
    states.push_back(state.dump());
  }
  for (const std::string& state : states) {
    craft_file("state.json", [&](std::string& text) { text = state; });
    expect_bad("state.json");
  }
}

TEST_F(Checkpoints, WithImpossibleNumbersAreRefused) {
  const auto field = [&](const std::string& from, const std::string& to) {
    craft_manifest([&](std::string& manifest) { replace(manifest, from, to); });
    EXPECT_EQ(run({"ckpt", "verify", folder()}), kNoCheckpoint) << to << output();
    EXPECT_TRUE(says("manifest.json")) << to << output();
    craft_manifest([&](std::string& manifest) { replace(manifest, to, from); });
  };
  field("\"tokens\": 768", "\"tokens\": -768");
  field("\"world\": 1", "\"world\": 0");
  field("\"sequence\": 3", "\"sequence\": -3");
  field("\"sequence\": 3", "\"sequence\": 1e86");
  field("\"format\": \"sbtrain checkpoint\"", "\"format\": " + std::string(100000, '['));
  field("\"tokens\": 768", "\"tokens\": 768,\n\"tokens\": 769");
}

TEST_F(Checkpoints, AnyFlippedBitOrMissingByteIsFound) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder())) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (int i = 0; i < rounds(12); ++i) {
    const fs::path& file = files[random_() % files.size()];
    const std::string good = read_file(file);
    if (i % 2 == 0) {
      flip_bit(file, random_() % (8 * good.size()));
    } else {
      write_file(file, good.substr(0, random_() % good.size()));
    }
    EXPECT_EQ(run({"ckpt", "verify", path("run")}), kNoCheckpoint) << i << file << output();
    EXPECT_TRUE(says(file.filename().string())) << i << output();
    EXPECT_EQ(run(generate({"--checkpoint", path("run")})), kNoCheckpoint) << i << file << output();
    write_file(file, good);
  }
  EXPECT_EQ(run({"ckpt", "verify", path("run")}), 0) << output();
}

// ---- a run whose newest checkpoint is damaged

class DamagedRun : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    fs::copy(trained(), path("run"), fs::copy_options::recursive);
    // A bit in the middle of a weight, which shows only when the tensor is read.
    const std::string shard = newest() + "/rank-00000-of-00001.safetensors";
    const std::string bytes = read_file(shard);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto entries = nlohmann::json::parse(bytes.substr(8, header));
    const auto& range = entries.at("model/model.norm.weight").at("data_offsets");
    flip_bit(shard, 8 * (8 + header + range.at(0).get<uint64_t>()) + 3);
  }
  std::string newest() const { return path("run/checkpoints/step-00000012"); }
  // Every command that reads the weights of a run.
  std::vector<Arguments> readers(const std::string& checkpoint, const std::string& output) const {
    return {{"eval", "--checkpoint", checkpoint, "--data", shared("b.h5")},
            generate({"--checkpoint", checkpoint}),
            {"export", "--checkpoint", checkpoint, "--output", path(output + "-hf")},
            train(path(output + "-run"), {"--init-from", checkpoint})};
  }
};

TEST_F(DamagedRun, IsReadFromTheNewestGoodCheckpoint) {
  for (const Arguments& arguments : readers(path("run"), "good")) {
    EXPECT_EQ(run(arguments), 0) << arguments[0] << output();
    EXPECT_TRUE(says("refusing checkpoint step-00000012")) << arguments[0] << output();
  }
  EXPECT_EQ(run({"export", "--checkpoint", path("run"), "--output", path("again")}), 0);
  EXPECT_TRUE(says("step 8 as")) << output();
  EXPECT_FALSE(fs::exists(path("again.tmp")));
}

TEST_F(DamagedRun, ItsDamagedCheckpointIsRefusedByName) {
  for (const Arguments& arguments : readers(newest(), "bad")) {
    EXPECT_EQ(run(arguments), kNoCheckpoint) << arguments[0] << output();
    EXPECT_TRUE(says("model.norm.weight")) << arguments[0] << output();
  }
  EXPECT_FALSE(fs::exists(path("bad-hf")) || fs::exists(path("bad-hf.tmp")));
}

// ---- a run that is going on

class LiveRun : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    training_.emplace(
        std::vector<std::string>{program(), "train", "--config", config(), "--out", path("run"),
                                 "--stages.0.length=1000000 steps", "--checkpoint.every=1 steps",
                                 "--checkpoint.keep=1", "--validation.every=0 steps"},
        path("log"), std::map<std::string, std::string>{{"OMP_NUM_THREADS", "1"}});
    for (int tries = 0; tries < 5000 && !fs::exists(path("run/checkpoints/latest")); ++tries) {
      ::usleep(2000);
    }
  }
  void TearDown() override { training_.reset(); }
  std::optional<Process> training_;
};

TEST_F(LiveRun, ItsCheckpointsAreVerifiedAndRead) {
  for (int i = 0; i < rounds(8); ++i) {
    for (const Arguments& arguments :
         {Arguments{"ckpt", "verify", path("run")},
          {"ckpt", "ls", path("run")},
          {"eval", "--checkpoint", path("run"), "--data", shared("b.h5")},
          generate({"--checkpoint", path("run")}),
          {"export", "--checkpoint", path("run"), "--output", path("hf" + std::to_string(i))},
          train(path("run" + std::to_string(i)), {"--init-from", path("run")})}) {
      EXPECT_EQ(run(arguments), 0) << arguments[0] << output();
      EXPECT_FALSE(says("bad:")) << arguments[0] << output();
    }
  }
  EXPECT_TRUE(training_->running()) << training_->output();
}

// ---- sweeps

TEST_F(LiveRun, OfASweepEndsWithIt) {
  training_.reset();
  write_file(path("long.yaml"),
             "include: " + config() + "\nstages: [{name: a, length: 1000000 steps}]\n");
  write_file(path("sweep.yaml"), "name: s\nvariants: [{name: v, config: long.yaml}]\n");
  Process sweep({program(), "sweep", path("sweep.yaml"), "--out", path("out")}, path("sweep.log"),
                {{"OMP_NUM_THREADS", "1"}});
  std::string run_folder;
  for (int tries = 0; tries < 5000 && run_folder.empty(); ++tries) {
    ::usleep(2000);
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(path("out"), none)) {
      if (entry.path().filename() == "latest") {
        run_folder = entry.path().parent_path().parent_path().string();
      }
    }
  }
  ASSERT_FALSE(run_folder.empty()) << sweep.output();
  sweep.signal(SIGKILL);
  EXPECT_EQ(sweep.wait(), 128 + SIGKILL);
  // The lock is free as soon as the orphan has saved and ended.
  int code = -1;
  for (int tries = 0; tries < 100 && code != 0; ++tries) {
    ::usleep(100000);
    code = run_in("", {"train", "--config", run_folder + "/config.yaml", "--out", run_folder,
                       "--stages.0.length=1 steps"});
  }
  EXPECT_EQ(code, 0) << output();
}

}  // namespace
}  // namespace sbtrain::test
