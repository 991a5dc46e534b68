// Plans that do not fit, sizes that overflow, and limits of memory at every command.
#include <limits>

#include "faults/driver.h"

namespace sbtrain::test {
namespace {

using MemoryLimits = Faults;
TEST_F(MemoryLimits, APlanBeyondTheMachineIsRefusedWithThePlan) {
  const std::vector<std::string> sizes = {"--model.width=16384", "--model.inner=16384",
                                          "--train.micro_batch=1024", "--train.batch=1024",
                                          "--train.sequence_length=16384"};
  std::vector<std::string> bench = {"bench", "train", "--config", config()};
  bench.insert(bench.end(), sizes.begin(), sizes.end());
  for (const Arguments& arguments : {train(path("o"), sizes), Arguments(bench)}) {
    EXPECT_EQ(run(arguments, 20), kMemory) << output();
    EXPECT_TRUE(says("out of memory: the run needs") && says("activations") && says("total") &&
                says("train.micro_batch"))
        << output();
  }
  EXPECT_FALSE(fs::exists(path("o/checkpoints"))) << "it is refused before the first step";
}

TEST_F(MemoryLimits, SizesThatNoMachineHasAreRefused) {
  const std::vector<std::string> largest = {"--model.width=16777216", "--model.inner=16777216",
                                            "--model.layers=10000", "--model.vocab=16777216"};
  for (const char* more : {"", "--dry-run"}) {
    std::vector<std::string> options = largest;
    if (*more != '\0') options.emplace_back(more);
    const int code = run(train(path("o"), options), 20);
    EXPECT_TRUE(code == kMemory || code == kMismatch) << code << output();
    EXPECT_FALSE(says(" -")) << "a negative number: " << output();
  }
  EXPECT_EQ(run(train(path("o"), {"--dry-run", "--stages.0.length=1e18 steps"}), 20), kMismatch)
      << output();
  EXPECT_TRUE(says("stages.0.length") && says("tokens together")) << output();
  EXPECT_EQ(run(train(path("o2"), {"--validation.tokens=1e18"})), 0) << output();
}

TEST_F(MemoryLimits, LengthsOfEvaluationAndGenerationAreChecked) {
  const Arguments eval = {"eval", "--checkpoint", trained(), "--data", shared("b.h5")};
  const auto with = [](Arguments arguments, const Arguments& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  for (const char* option : {"--sequence-length", "--lengths", "--window"}) {
    for (const char* value : {"4611686018427387904", "9223372036854775807", "-1", "1e30"}) {
      EXPECT_EQ(run(with(eval, {option, value})), kUsage) << option << value << output();
    }
    EXPECT_EQ(run(with(eval, {option, "1073741824"}), 20), kMemory) << option << output();
    EXPECT_TRUE(says("GiB free") && says("total")) << option << output();
  }
  EXPECT_EQ(run(with(eval, {"--tokens", "9223372036854775807"})), kUsage) << output();
  EXPECT_EQ(run(with(eval, {"--tokens", "1152921504606846976"})), 0) << output();
  EXPECT_FALSE(says("nan")) << output();
  EXPECT_EQ(run(generate({"--max-tokens", "9223372036854775807"})), kUsage) << output();
  for (const Arguments& sizes :
       {Arguments{"ops", "--tokens", "1073741824", "--width", "1073741824"},
        Arguments{"ops", "--inner", "1073741824", "--width", "1073741824"},
        Arguments{"attention", "--tokens", "1073741824", "--lengths", "1073741824", "--width",
                  "1048576", "--head-dims", "1048576"}}) {
    EXPECT_EQ(run(with({"bench"}, sizes), 20), kMemory) << sizes[1] << output();
  }
  EXPECT_EQ(run({"bench", "attention", "--lengths", "9223372036854775807"}), kUsage) << output();
}

TEST_F(MemoryLimits, TheLimitOfTheAddressSpaceCounts) {
  if (kSanitized) GTEST_SKIP() << "a limit of addresses says nothing under a sanitizer";
  EXPECT_EQ(run_in(address_limit(2000), train(path("o"), {"--model.width=16384"})), kMemory)
      << output();
  EXPECT_TRUE(says("ulimit -v") && says("total")) << output();
  EXPECT_EQ(run_in(address_limit(2000), {"eval", "--checkpoint", trained(), "--data",
                                         shared("b.h5"), "--sequence-length", "16777216"}),
            kMemory)
      << output();
  EXPECT_TRUE(says("ulimit -v")) << output();
  EXPECT_EQ(run_in(address_limit(2000), {"eval", "--checkpoint", trained(), "--tasks", "passkey",
                                         "--lengths", "16777216"}),
            kMemory)
      << output();
  EXPECT_TRUE(says("ulimit -v")) << output();
  EXPECT_EQ(run_in(address_limit(2000), generate({"--max-tokens", "1073741824"})), kMemory)
      << output();
  EXPECT_TRUE(says("ulimit -v")) << output();
}

// OpenBLAS maps its buffers in a loop that only success ends, OpenMP exits with code 1.
TEST_F(MemoryLimits, TooFewAddressesForTheLibrariesAreRefused) {
  if (kSanitized) GTEST_SKIP() << "a limit of addresses says nothing under a sanitizer";
  const Arguments eval = {"eval", "--checkpoint", trained(), "--data", shared("b.h5")};
  for (const int mebibytes : {20, 100, 200, 300, 450, 600, 900, 1200}) {
    for (const Arguments& arguments : {train(path("o")), eval, generate()}) {
      const std::string limits = address_limit(mebibytes) + "; export OMP_NUM_THREADS=4";
      const int code = run_in(limits, arguments, "", 20);
      EXPECT_TRUE(code == 0 || code == kMemory) << limits << ": " << code << "\n" << output();
      EXPECT_TRUE(code == 0 || says("memory") || says("thread")) << output();
      fs::remove_all(path("o"));
    }
  }
}

TEST_F(MemoryLimits, AStackThatIsTooSmallIsToldSo) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take more stack than that before main";
  for (const int kibibytes : {64, 128, 512}) {
    const std::string limit = "ulimit -s " + std::to_string(kibibytes);
    EXPECT_EQ(run_in(limit, train(path("o"))), kMemory) << limit << output();
    EXPECT_TRUE(says("ulimit -s")) << output();
    fs::remove_all(path("o"));
  }
  EXPECT_EQ(run_in("ulimit -s 1024", train(path("o"))), 0) << output();
}

TEST_F(MemoryLimits, ThreadsThatCannotBeStartedAreCounted) {
  fs::permissions(path(""), fs::perms::all);
  fs::create_directory(path("run"));
  fs::permissions(path("run"), fs::perms::all);
  const std::vector<Arguments> commands = {
      train(path("run/o")),
      {"eval", "--checkpoint", trained(), "--data", shared("b.h5")},
      generate(),
      {"bench", "ops", "--repeats", "1"},
      {"tokenizer", "train", "--input", shared("a.jsonl"), "--vocab", "400", "--output",
       path("t.model")}};
  for (const Arguments& arguments : commands) {
    const int code = run_in(without_threads("export OMP_NUM_THREADS=4"), arguments, "", 20);
    if (code == 126 || code == 127) GTEST_SKIP() << "cannot run as another user: " << output();
    EXPECT_EQ(code, kMemory) << arguments[0] << output();
    EXPECT_TRUE(says("threads, only") || says("cannot start")) << arguments[0] << output();
  }
  EXPECT_EQ(left(), std::vector<std::string>{"run"});
}

}  // namespace
}  // namespace sbtrain::test
