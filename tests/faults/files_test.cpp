// Limits, full disks, outputs that are inputs, and inputs that are not files.
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdlib>

#include "faults/driver.h"

namespace sbtrain::test {
namespace {

using Files = Faults;
// ---- limits

TEST_F(Files, AFullDiskEndsPreparingAndLeavesNothing) {
  const auto whole = static_cast<int>(fs::file_size(store()) / 1024 + 1);
  std::vector<int> limits = {0, 1, 2, 3, 4, 8, whole / 2, whole - 3, whole - 2, whole - 1};
  for (int i = 0; i < rounds(4); ++i) limits.push_back(static_cast<int>(random_() % whole));
  for (const int kibibytes : limits) {
    EXPECT_EQ(run_in("ulimit -f " + std::to_string(kibibytes) + " 2>/dev/null",
                     prepare(shared("a.jsonl"), path("o.h5")), ">/dev/null 2>&1"),
              kStorage)
        << kibibytes << " KiB";
    EXPECT_EQ(left(), std::vector<std::string>{}) << kibibytes << " KiB";
  }
}

TEST_F(Files, AFullDiskLeavesTheOldFile) {
  ASSERT_EQ(run(prepare(shared("b.jsonl"), path("o.h5"))), 0) << output();
  const std::string before = read_file(path("o.h5"));
  EXPECT_EQ(run_in("ulimit -f 2", prepare(shared("a.jsonl"), path("o.h5")), ">/dev/null 2>&1"),
            kStorage);
  EXPECT_TRUE(read_file(path("o.h5")) == before);
  EXPECT_EQ(left(), std::vector<std::string>{"o.h5"});
}

// Runs the program where path("disk") is a file system in memory of that many KiB, then the shell
// command `then`, whose output says what is left, since the file system goes with its last process.
// Returns the program's exit code, or -1 where this user may not mount one.
class SmallDisk : public Faults {
 protected:
  void SetUp() override {
    Faults::SetUp();
    fs::create_directory(path("disk"));
  }
  int run_on(int kibibytes, const Arguments& arguments, const std::string& then) {
    constexpr int kNoMount = 99;
    const std::string inside = "mount -t tmpfs -o size=" + std::to_string(kibibytes) + "k none " +
                               path("disk") + " || exit " + std::to_string(kNoMount) +
                               "; \"$@\"; code=$?; " + then + "; exit $code";
    const int code = run_in("set -- unshare -rm bash -c '" + inside + "' bash \"$@\"", arguments);
    return code == kNoMount || says("unshare") ? -1 : code;
  }
};

TEST_F(SmallDisk, EndsPreparingAndLeavesNothing) {
  const std::string then = "echo left: $(ls -A " + path("disk") + ").";
  const auto pages = static_cast<int>(fs::file_size(store()) / 4096);
  for (const int kibibytes : {4, 40, 4 * pages}) {  // the last one lacks a page
    const int code = run_on(kibibytes, prepare(shared("a.jsonl"), path("disk/o.h5")), then);
    if (code == -1) GTEST_SKIP() << "this user may not mount a file system: " << output();
    EXPECT_EQ(code, kStorage) << kibibytes << output();
    EXPECT_TRUE(says("left: .") && says("No space left")) << kibibytes << output();
    EXPECT_FALSE(says("buf =")) << kibibytes << output();
  }
}

// Of four saves in a row the first one fits, so that the run ends at the fourth.
TEST_F(SmallDisk, EndsARunWhoseCheckpointStaysWhole) {
  const std::string then = program() + " ckpt verify " + path("disk/run") + "; echo left: $(ls " +
                           path("disk/run/checkpoints") + ").";
  const int code = run_on(200, train(path("disk/run"), {"--stages.0.length=60 steps"}), then);
  if (code == -1) GTEST_SKIP() << "this user may not mount a file system: " << output();
  EXPECT_EQ(code, kStorage) << output();
  EXPECT_TRUE(says("3 checkpoints in a row could not be saved")) << output();
  EXPECT_TRUE(says("step-00000004: ok") && says("left: latest step-00000004.")) << output();
}

TEST_F(Files, AFullDiskEndsTokenizerTrainingAndEvaluation) {
  EXPECT_EQ(run_in("ulimit -f 1",
                   {"tokenizer", "train", "--input", shared("a.jsonl"), "--vocab", "400",
                    "--output", path("t.model")},
                   ">/dev/null 2>&1"),
            kStorage);
  EXPECT_EQ(run_in("ulimit -f 0",
                   {"eval", "--checkpoint", trained(), "--data", shared("b.h5"), "--json",
                    path("e.json")},
                   ">/dev/null 2>&1"),
            kStorage);
  EXPECT_EQ(left(), std::vector<std::string>{});
}

TEST_F(Files, ThreadsThatCannotBeStartedAreDoneWithout) {
  if (kSanitized) GTEST_SKIP() << "a limit of addresses says nothing under a sanitizer";
  const Arguments many = prepare(shared("a.jsonl"), path("o.h5"), {"--threads", "1024"});
  for (const std::string& limit : {address_limit(2500), address_limit(500)}) {
    const int code = run_in(limit, many);
    EXPECT_TRUE(code == 0 || code == kMemory) << limit << ": " << code << "\n" << output();
    EXPECT_FALSE(says("micro_batch")) << "advice for training: " << output();
    if (code == 0) {
      EXPECT_TRUE(read_file(path("o.h5")) == read_file(store()));
      fs::remove(path("o.h5"));
    }
    EXPECT_EQ(left(), std::vector<std::string>{}) << limit;
  }
}

TEST_F(Files, WithoutAnyThreadItEndsCleanly) {
  const int code = run_in(without_threads(), prepare(shared("a.jsonl"), path("o.h5")));
  if (code == 126 || code == 127) GTEST_SKIP() << "cannot run as another user: " << output();
  EXPECT_EQ(code, kMemory) << output();
  EXPECT_EQ(left(), std::vector<std::string>{});
}

TEST_F(Files, MemoryStaysBoundedWhateverTheLine) {
  if (kSanitized) GTEST_SKIP() << "a limit of addresses says nothing under a sanitizer";
  constexpr size_t kBytes = size_t{4} << 20;
  write_file(path("a.txt"), std::string(kBytes, 'a'));
  std::string words;
  while (words.size() < kBytes) words += "some words and more ";
  write_file(path("words.jsonl"), "{\"text\": \"" + words + "\"}\n");
  for (const char* input : {"a.txt", "words.jsonl"}) {
    EXPECT_EQ(run_in(address_limit(600), prepare(path(input), path("o.h5"))), 0) << input << "\n"
                                                                                 << output();
    EXPECT_EQ(says("text was cut"), std::string(input) == "a.txt") << output();
  }
  std::string nested(size_t{4} << 20, '[');
  write_file(path("deep.jsonl"), "{\"text\": \"x\", \"meta\": " + nested + "}\n");
  EXPECT_EQ(run_in(address_limit(500), prepare(path("deep.jsonl"), path("o.h5"))), kData);
  EXPECT_TRUE(says("deep.jsonl:1")) << output();
  EXPECT_LT(output().size(), 2000U);
}

TEST_F(Files, ALineBeyondTheLimitIsRefusedByItsNumber) {
  write_file(path("long.jsonl"),
             "{\"text\": \"x\"}\n{\"text\": \"" + std::string(size_t{65} << 20, 'a') + "\"}\n");
  EXPECT_EQ(run(prepare(path("long.jsonl"), path("o.h5"))), kData);
  EXPECT_TRUE(says("long.jsonl:2") && says("64 MiB")) << output();
  EXPECT_EQ(left(), std::vector<std::string>{"long.jsonl"});
}

// ---- outputs that are inputs

TEST_F(Files, AnOutputIsNoInput) {
  const std::string text = read_file(shared("b.jsonl"));
  write_file(path("in.jsonl"), text);
  write_file(path("o.h5.tmp"), text);
  fs::create_hard_link(path("in.jsonl"), path("hard"));
  fs::create_symlink(path("in.jsonl"), path("soft"));
  fs::create_directory(path("folder"));
  write_file(path("folder/in.jsonl"), text);
  fs::copy_file(tokenizer(), path("t.model"));
  const auto names = left();
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {path("in.jsonl"), path("in.jsonl")},
      {path("in.jsonl"), path("hard")},
      {path("in.jsonl"), path("soft")},
      {path("o.h5.tmp"), path("o.h5")},
      {path("folder"), path("folder/in.jsonl")}};
  for (const auto& [input, output_path] : pairs) {
    EXPECT_EQ(run(prepare(input, output_path)), kUsage) << output_path << output();
    EXPECT_TRUE(says("is an input")) << output();
    EXPECT_EQ(
        run({"tokenizer", "train", "--input", input, "--vocab", "300", "--output", output_path}),
        kUsage)
        << output_path << output();
  }
  EXPECT_EQ(run({"prepare", "--input", path("in.jsonl"), "--tokenizer", path("t.model"), "--output",
                 path("t.model")}),
            kUsage)
      << output();
  for (const char* file : {"in.jsonl", "o.h5.tmp", "folder/in.jsonl"}) {
    EXPECT_TRUE(read_file(path(file)) == text) << file;
  }
  EXPECT_TRUE(read_file(path("t.model")) == read_file(tokenizer()));
  EXPECT_EQ(left(), names);
}

// What eval and data tasks read is as precious as what prepare reads.
TEST_F(Files, ResultsReplaceNoInput) {
  write_file(path("words.txt"), read_file(shared("a.jsonl")));
  fs::copy_file(shared("b.h5"), path("b.h5"));
  fs::copy_file(tokenizer(), path("t.model"));
  fs::copy(trained(), path("run"), fs::copy_options::recursive);
  const std::string run_folder = path("run");
  std::string weights;
  for (const auto& file : fs::recursive_directory_iterator(run_folder)) {
    if (file.path().extension() == ".safetensors") weights = file.path().string();
  }
  std::vector<std::vector<std::string>> commands;
  for (const std::string& file : {path("b.h5"), path("t.model"), weights}) {
    commands.push_back({"eval", "--checkpoint", run_folder, "--data", path("b.h5"), "--tokenizer",
                        path("t.model"), "--json", file});
  }
  const std::vector<std::string> tasks = {"--tasks",    "needle_local_single", "--lengths", "600",
                                          "--haystack", path("words.txt"),     "--samples", "1"};
  commands.push_back({"eval", "--checkpoint", run_folder, "--json", path("words.txt")});
  commands.push_back(
      {"data", "tasks", "--tokenizer", path("t.model"), "--output", path("t.model")});
  commands.push_back(
      {"data", "tasks", "--tokenizer", path("t.model"), "--output", path("words.txt")});
  for (size_t i = 3; i < commands.size(); ++i) {
    commands[i].insert(commands[i].end(), tasks.begin(), tasks.end());
  }
  for (const std::vector<std::string>& command : commands) {
    EXPECT_EQ(run(command), kUsage) << output();
    EXPECT_TRUE(says("is an input")) << output();
  }
  EXPECT_TRUE(read_file(path("b.h5")) == read_file(shared("b.h5")));
  EXPECT_TRUE(read_file(path("t.model")) == read_file(tokenizer()));
  EXPECT_TRUE(read_file(path("words.txt")) == read_file(shared("a.jsonl")));
  EXPECT_EQ(run({"ckpt", "verify", run_folder}), 0) << output();
}

TEST_F(Files, OnlyFilesAreReplaced) {
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  fs::create_symlink("/dev/null", path("null"));
  const bool device = mknod(path("device").c_str(), S_IFCHR | 0666, makedev(1, 3)) == 0;
  const auto names = left();
  for (const std::string name : {"fifo", "folder", "null", "device"}) {
    if (name == "device" && !device) continue;
    EXPECT_EQ(run(prepare(shared("b.jsonl"), path(name))), kUsage) << name << output();
    EXPECT_EQ(
        run({"eval", "--checkpoint", trained(), "--data", shared("b.h5"), "--json", path(name)}),
        kUsage)
        << name << output();
    EXPECT_EQ(run({"tokenizer", "train", "--input", shared("b.jsonl"), "--vocab", "300", "--output",
                   path(name)}),
              kUsage)
        << name << output();
  }
  EXPECT_EQ(left(), names);
  EXPECT_TRUE(fs::is_fifo(path("fifo")) && fs::is_symlink(path("null")));
  EXPECT_TRUE(!device || fs::is_character_file(path("device")));
}

TEST_F(Files, ALinkStaysALinkAndItsFileIsReplaced) {
  fs::create_directory(path("elsewhere"));
  fs::create_symlink("elsewhere/real.h5", path("link.h5"));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(run(prepare(shared("a.jsonl"), path("link.h5"))), 0) << output();
    EXPECT_TRUE(fs::is_symlink(path("link.h5")));
    EXPECT_TRUE(read_file(path("elsewhere/real.h5")) == read_file(store()));
  }
}

TEST_F(Files, ARunDestroysNoFileOfAnother) {
  const std::string run_folder = path("run");
  fs::create_directory(run_folder);
  const std::string own = "# mine\n" + read_file(config());
  write_file(run_folder + "/config.yaml", own);
  EXPECT_EQ(run({"--config", run_folder + "/config.yaml", "--out=" + run_folder}), kUsage)
      << output();
  EXPECT_TRUE(says("config.yaml")) << output();
  EXPECT_TRUE(read_file(run_folder + "/config.yaml") == own);
}

TEST_F(Files, ARunContinuesFromItsOwnConfiguration) {
  const std::string out = path("run");
  ASSERT_EQ(run(train(out, {"--stages.0.length=8 steps"})), 0) << output();
  const std::string before = read_file(out + "/config.yaml");
  EXPECT_EQ(run({"--config", out + "/config.yaml", "--out=" + out, "--stages.0.length=12 steps"}),
            0)
      << output();
  EXPECT_TRUE(read_file(out + "/config.yaml.old") == before);
  EXPECT_TRUE(fs::exists(out + "/checkpoints/step-00000012"));
}

TEST_F(Files, EarlierMetricsAndConfigurationsAreKept) {
  const std::string out = path("run");
  std::vector<std::string> metrics;
  for (const char* seed : {"1", "2", "3"}) {
    ASSERT_EQ(run(train(out, {"--checkpoint.resume=none", std::string("--seed=") + seed})), 0)
        << output();
    metrics.push_back(read_file(out + "/metrics.jsonl"));
  }
  EXPECT_TRUE(read_file(out + "/metrics.jsonl.old") == metrics[0]);
  EXPECT_TRUE(read_file(out + "/metrics.jsonl.old.2") == metrics[1]);
  EXPECT_NE(read_file(out + "/config.yaml.old").find("seed: 1"), std::string::npos);
  EXPECT_NE(read_file(out + "/config.yaml.old.2").find("seed: 2"), std::string::npos);
  // A complete run does not change, whatever options it is started with.
  const std::string before = read_file(out + "/config.yaml");
  EXPECT_EQ(run(train(out, {"--seed=3", "--train.lr=1"})), 0) << output();
  EXPECT_TRUE(read_file(out + "/config.yaml") == before);
}

// ---- configurations

TEST_F(Files, AnIncludedFileHoldsKeysAndValues) {
  write_file(path("c.yaml"), "include: [" + config() + ", included.yaml]\n");
  for (const std::string text : {"some words\n", "[1, 2]\n", "- train: {lr: 1}\n"}) {
    write_file(path("included.yaml"), text);
    EXPECT_EQ(run({"config", "show", "--config", path("c.yaml")}), kMismatch) << text << output();
    EXPECT_TRUE(says("included.yaml:1:1: expected keys and values") && says("included from"))
        << text << output();
  }
  write_file(path("included.yaml"), "# nothing yet\n");
  EXPECT_EQ(run({"config", "show", "--config", path("c.yaml")}), 0) << output();
}

TEST_F(Files, ManyWrongKeysAreRefusedInFewWords) {
  std::string text = "include: " + config() + "\n";
  for (int i = 0; i < 49000; ++i) text += "key" + std::to_string(i) + ": 1\n";
  write_file(path("c.yaml"), text);
  EXPECT_EQ(run({"config", "show", "--config", path("c.yaml")}), kMismatch);
  EXPECT_TRUE(says("49000 problems") && says("unknown key 'key0'") && says("and 48980 more"));
  write_file(path("c.yaml"), text + "key7: 2\n");
  EXPECT_EQ(run({"config", "show", "--config", path("c.yaml")}), kMismatch);
  EXPECT_TRUE(says("duplicate key 'key7', first set in line 9")) << output();
}

TEST_F(Files, ALengthBeyondTheLargestIsToldSo) {
  EXPECT_EQ(run(train(path("o"), {"--dry-run", "--stages.0.length=9e18 steps"})), kMismatch);
  EXPECT_TRUE(says("9e18 steps is out of range: at most 1e+18")) << output();
  EXPECT_EQ(run(train(path("o"), {"--dry-run", "--stages.0.length=0 steps"})), kMismatch);
  EXPECT_TRUE(says("at least 1")) << output();
}

// ---- inputs that are not files

// Whoever asks what is at such a path gets an error, not an answer.
TEST_F(Files, ALinkToItselfIsNamed) {
  for (const std::string name :
       {"run.json", "config.yaml", "metrics.jsonl", "checkpoints", "lock"}) {
    const std::string out = path("with_" + name);
    fs::create_directory(out);
    const fs::path link = fs::path(out) / name;
    fs::create_symlink(name, link);
    const int code = run(train(out));
    EXPECT_TRUE(code > 1 && code < 85) << name << " " << code << output();
    EXPECT_TRUE(says(link.string()) && !says("internal error")) << output();
  }
}

TEST_F(Files, AFifoIsNoInput) {
  const std::string fifo = path("fifo.jsonl");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  write_file(path("include.yaml"), "include: " + fifo + "\n");
  const std::vector<std::pair<Arguments, int>> commands = {
      {{"train", "--config", fifo, "--dry-run"}, kMismatch},
      {{"config", "show", "--config", path("include.yaml")}, kMismatch},
      {train(path("o1"), {"--data.sources=[{path: " + fifo + "}]"}), kData},
      {train(path("o2"), {"--data.validation=[" + fifo + "]"}), kData},
      {train(path("o3"), {"--data.tokenizer=" + fifo}), kData},
      {prepare(fifo, path("o.h5")), kUsage},
      {{"prepare", "--input", shared("b.jsonl"), "--tokenizer", fifo, "--output", path("o.h5")},
       kData},
      {{"data", "verify", fifo}, kData},
      {{"data", "info", fifo}, kData},
      {generate({"--tokenizer", fifo}), kData},
      {{"eval", "--checkpoint", trained(), "--data", fifo}, kData},
      {{"eval", "--checkpoint", trained(), "--true-positions", fifo}, kData},
      {{"sweep", fifo}, kMismatch},
      {{"train", "--config", "/dev/zero", "--dry-run"}, kMismatch},
      {{"data", "verify", "/dev/zero"}, kData},
  };
  for (const auto& [arguments, expected] : commands) {
    EXPECT_EQ(run(arguments, 20), expected) << arguments[0] << " " << arguments[1] << output();
    EXPECT_TRUE(says("not a regular file")) << output();
  }
}

TEST_F(Files, AFifoIsNoPartOfACheckpoint) {
  const std::string newest = read_file(trained() + "/checkpoints/latest");
  const std::string step = newest.substr(0, newest.find('\n'));
  for (const std::string& name :
       {std::string("latest"), step + "/manifest.json", step + "/state.json", step + "/config.yaml",
        step + "/rank-00000-of-00001.safetensors"}) {
    fs::remove_all(path("run"));
    fs::copy(trained(), path("run"), fs::copy_options::recursive);
    fs::remove(path("run/checkpoints/" + name));
    ASSERT_EQ(mkfifo(path("run/checkpoints/" + name).c_str(), 0600), 0);
    EXPECT_EQ(run({"ckpt", "verify", path("run")}, 20), kNoCheckpoint) << name << output();
    EXPECT_TRUE(says("not a regular file")) << name << output();
    if (name == "latest") continue;  // a good checkpoint is found without it
    EXPECT_EQ(
        run({"eval", "--checkpoint", path("run/checkpoints/" + step), "--data", shared("b.h5")},
            20),
        kNoCheckpoint)
        << name << output();
  }
}

}  // namespace
}  // namespace sbtrain::test
