// Standard streams that are closed, full or end early.
#include "faults/driver.h"

namespace sbtrain::test {
namespace {

using Streams = Faults;
// Every combination of closed standard streams.
std::vector<std::string> closings() {
  return {"0<&-", "1>&-", "2>&-", "0<&- 1>&-", "0<&- 2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"};
}

TEST_F(Streams, NoTextOfClosedOnesGoesIntoAStore) {
  for (const std::string& closed : closings()) {
    const int code = run_in("", prepare(shared("a.jsonl"), path("o.h5")), closed);
    const bool lost = closed.find("1>") != std::string::npos;
    EXPECT_EQ(code, lost ? kStorage : 0) << closed << output();
    EXPECT_TRUE(read_file(path("o.h5")) == read_file(store())) << closed;
    fs::remove(path("o.h5"));
  }
}

TEST_F(Streams, NoTextOfClosedOnesGoesIntoARun) {
  const std::string last = "/checkpoints/step-00000012/rank-00000-of-00001.safetensors";
  for (const std::string closed : {"2>&-", "0<&- 1>&- 2>&-"}) {
    EXPECT_EQ(run_in("", train(path("run")), closed), 0) << closed << output();
    EXPECT_TRUE(read_file(path("run") + last) == read_file(trained() + last)) << closed;
    EXPECT_EQ(run({"ckpt", "verify", path("run")}), 0) << closed << output();
    fs::remove_all(path("run"));
  }
}

TEST_F(Streams, OutputThatIsLostIsAFailure) {
  const std::vector<Arguments> commands = {
      generate(),
      {"eval", "--checkpoint", trained(), "--data", shared("b.h5")},
      {"eval", "--checkpoint", trained(), "--data", shared("b.h5"), "--json"},
      {"eval", "--checkpoint", trained(), "--data", shared("b.h5"), "--lengths", "8,16"},
      {"data", "info", store()},
      {"data", "verify", store()},
      {"ckpt", "ls", trained()},
      {"config", "docs"},
      {"config", "show", "--config", config()},
      train(path("o"), {"--dry-run"}),
      {"--help"},
      {"--version"},
      {},
  };
  for (const Arguments& arguments : commands) {
    const std::string name = arguments.empty() ? "(none)" : arguments[0];
    EXPECT_EQ(run_in("", arguments, ">/dev/full"), kStorage) << name << output();
    EXPECT_TRUE(says("standard output")) << name << output();
    EXPECT_EQ(run_in("", arguments, ">&-"), kStorage) << name << output();
  }
  EXPECT_EQ(run_in("", generate(), "2>/dev/full"), 0) << output();
}

TEST_F(Streams, AReaderThatLeavesEndsAToolAndNotARun) {
  // The second text comes when the reader of the first byte has left.
  const Arguments lines = {"generate", "--checkpoint", trained(), "--max-tokens", "8"};
  EXPECT_EQ(run_in("", lines, "< <(echo The; sleep 1; echo The) | head -c 1"), kStorage)
      << output();
  EXPECT_EQ(run_in("", {"config", "docs"}, "| true"), kStorage) << output();
  EXPECT_EQ(run_in("", train(path("run")), "2>&1 | head -1"), 0) << output();
  EXPECT_TRUE(fs::exists(path("run/checkpoints/step-00000012/manifest.json")));
  EXPECT_EQ(run_in("", prepare(shared("a.jsonl"), path("o.h5")), "2>&1 >/dev/null | true"), 0);
  EXPECT_TRUE(read_file(path("o.h5")) == read_file(store()));
}

TEST_F(Streams, InputThatCannotBeReadIsNoEmptyPrompt) {
  const Arguments lines = {"generate", "--checkpoint", trained(), "--max-tokens", "2"};
  Arguments whole = lines;
  whole.insert(whole.end(), {"--prompt", "-"});
  for (const Arguments& arguments : {lines, whole}) {
    EXPECT_EQ(run_in("", arguments, "< " + path("")), kData) << output();
    EXPECT_TRUE(says("standard input: cannot read: Is a directory")) << output();
    EXPECT_EQ(run_in("", arguments, "< /dev/null"), 0) << output();
  }
}

TEST_F(Streams, OptionsThatAreNoNumbersAreRefused) {
  for (const char* option : {"--temperature", "--top-p"}) {
    for (const char* value : {"nan", "-nan", "NAN", "inf", "-1", "1e400", "x", ""}) {
      EXPECT_EQ(run(generate({option, value})), 2) << option << " " << value << output();
    }
  }
  EXPECT_EQ(run(train(path("o"), {"--dry-run", "--mfu", "nan"})), 2) << output();
  EXPECT_EQ(run(train(path("o"), {"--dry-run", "--peak-tflops", "nan"})), 2) << output();
  EXPECT_EQ(run({"generate", "--checkpoint", trained(), "--prompt=", "--max-tokens", "2"}), 0)
      << output();
}

}  // namespace
}  // namespace sbtrain::test
