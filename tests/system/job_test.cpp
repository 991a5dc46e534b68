// Jobs of several processes as the command line starts and ends them.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

#include "runs.h"

namespace sbtrain::test {
namespace {

class Job : public SystemTest {
 protected:
  // A port that was free a moment ago.
  static int free_port() {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
    ::close(fd);
    return ntohs(address.sin_port);
  }

  // Runs one process for each list of arguments, as torchrun would.
  void run_job(const std::vector<std::vector<std::string>>& ranks) {
    const int port = free_port();
    std::vector<std::unique_ptr<Process>> processes;
    codes_.clear();
    outputs_.clear();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      std::map<std::string, std::string> variables = environment_;
      variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
      variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(ranks.size());
      variables["MASTER_ADDR"] = "127.0.0.1";
      variables["MASTER_PORT"] = std::to_string(port);
      processes.push_back(std::make_unique<Process>(
          command(ranks[rank]), folder_ / ("log" + std::to_string(rank)), variables));
    }
    for (const auto& process : processes) {
      codes_.push_back(process->wait());
      outputs_.push_back(process->output());
    }
  }

  static bool says(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  std::vector<int> codes_;
  std::vector<std::string> outputs_;
};

TEST_F(Job, RanksWithDifferentConfigurationsAreRefusedOnce) {
  run_job({training("run"), training("run", {"--train.lr=0.5"}), training("run")});
  EXPECT_EQ(codes_, (std::vector<int>{3, 3, 3}));
  EXPECT_TRUE(says(outputs_[0], "train.lr: '0.003' on ranks 0, 2; '0.5' on rank 1")) << outputs_[0];
  EXPECT_EQ(outputs_[1], "");
  EXPECT_EQ(outputs_[2], "");
  for (const char* log : {"rank-00000.log", "rank-00001.log", "rank-00002.log"}) {
    EXPECT_TRUE(says(read_file(path("run") + "/logs/" + log), "started by torchrun")) << log;
  }
}

TEST_F(Job, AMissingRankIsNamed) {
  environment_.insert({{"RANK", "0"},
                       {"LOCAL_RANK", "0"},
                       {"WORLD_SIZE", "2"},
                       {"LOCAL_WORLD_SIZE", "2"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", std::to_string(free_port())}});
  EXPECT_EQ(run(training("run", {"--train.rendezvous_timeout=1"})), 7);
  EXPECT_TRUE(says(output_, "rank 1 of 2 did not come within 1 s")) << output_;
}

// Before they connect, read data or take memory.
TEST_F(Job, ABatchThatTheRanksCannotShareIsRefusedAtTheStart) {
  const std::vector<std::string> arguments = training("run", {"--train.batch=8"});
  run_job({arguments, arguments, arguments});
  EXPECT_EQ(codes_, (std::vector<int>{3, 3, 3}));
  EXPECT_TRUE(says(outputs_[0], "train.batch: 8 sequences cannot be shared by 3 ranks"))
      << outputs_[0];
}

TEST_F(Job, TheErrorOfOneRankEndsAllAndIsShownOnce) {
  run_job({training("run"), {"--config", path("missing.yaml")}});
  EXPECT_EQ(codes_, (std::vector<int>{3, 3}));
  EXPECT_TRUE(says(outputs_[0], "error: rank 1: ")) << outputs_[0];
  EXPECT_TRUE(says(outputs_[0], "missing.yaml")) << outputs_[0];
  EXPECT_EQ(outputs_[1], "");
}

TEST_F(Job, AnErrorOfAllRanksIsShownOnce) {
  const std::vector<std::string> arguments = training("run", {"--train.lr=fast"});
  run_job({arguments, arguments, arguments});
  EXPECT_EQ(codes_, (std::vector<int>{3, 3, 3}));
  EXPECT_TRUE(says(outputs_[0], "train.lr")) << outputs_[0];
  EXPECT_EQ(outputs_[1] + outputs_[2], "");
}

TEST_F(Job, AWrongCommandLineIsShownOnce) {
  const std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--recal"};
  run_job({arguments, arguments, arguments});
  EXPECT_EQ(codes_, (std::vector<int>{2, 2, 2}));
  EXPECT_TRUE(says(outputs_[0], "--recal")) << outputs_[0];
  EXPECT_EQ(outputs_[1] + outputs_[2], "");
}

TEST_F(Job, AWrongCommandLineOfOneRankEndsAll) {
  run_job({training("run"), {"train", "--no-such-option"}});
  EXPECT_EQ(codes_, (std::vector<int>{2, 2}));
  EXPECT_TRUE(says(outputs_[0], "error: rank 1: unknown option '--no-such-option'")) << outputs_[0];
  EXPECT_EQ(outputs_[1], "");
}

TEST_F(Job, ATextThatIsAskedForIsPrintedOnce) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--version"}, {"eval", "--help"}, {}}) {
    run_job({arguments, arguments});
    EXPECT_EQ(codes_, (std::vector<int>{0, 0}));
    EXPECT_NE(outputs_[0], "");
    EXPECT_EQ(outputs_[1], "");
  }
}

TEST_F(Job, AMissingCheckpointIsShownOnce) {
  const std::vector<std::string> arguments = {"eval", "--checkpoint", path("none")};
  run_job({arguments, arguments});
  EXPECT_EQ(codes_[0], codes_[1]);
  EXPECT_NE(codes_[0], 0);
  EXPECT_TRUE(says(outputs_[0], path("none"))) << outputs_[0];
  EXPECT_EQ(outputs_[1], "");
}

class RankedEvaluation : public Job {
 protected:
  // A run of a few steps.
  void train() {
    ASSERT_EQ(run(training("run", {"--stages.0.length=6 steps", "--stages.1.length=1 steps"})), 0)
        << output_;
  }
  std::vector<std::string> evaluation(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"eval", "--checkpoint", path("run"), "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  // What is printed in worlds of 1, 2 and 4 ranks must be equal to the last digit, which stands for
  // the last bit.
  void expect_equal_in_all_worlds(std::vector<std::string> more,
                                  const std::string& result = "\"loss\"") {
    more.insert(more.end(), {"--device", "cpu"});
    const std::vector<std::string> arguments = evaluation(more);
    ASSERT_EQ(run(arguments), 0) << output_;
    const std::string alone = output_;
    EXPECT_TRUE(says(alone, result)) << alone;
    for (const size_t world : {2, 4}) {
      run_job(std::vector<std::vector<std::string>>(world, arguments));
      EXPECT_EQ(outputs_[0], alone);
      for (size_t rank = 0; rank < world; ++rank) {
        EXPECT_EQ(codes_[rank], 0);
        EXPECT_TRUE(rank == 0 || outputs_[rank].empty()) << outputs_[rank];
      }
    }
  }
};

TEST_F(RankedEvaluation, HasTheSameBitsInAllWorlds) {
  train();
  const std::vector<std::vector<std::string>> kinds = {
      {"--tokens", "300"},  // fewer batches than a multiple of the ranks
      {"--recall"},
      {"--lengths", "16,48,100000", "--recall"},
      {"--window", "32", "--stride", "5", "--recall"}};
  for (const std::vector<std::string>& kind : kinds) {
    SCOPED_TRACE(kind.front());
    expect_equal_in_all_worlds(kind);
  }
}

TEST_F(RankedEvaluation, OfTextTasksHasTheSameBitsInAllWorlds) {
  train();
  // Five samples are no multiple of the ranks, and vt does not fit 400 tokens.
  expect_equal_in_all_worlds(
      {"--tasks", "passkey,niah_multikey_2,vt", "--lengths", "400,500", "--samples", "5"},
      "\"score\"");
}

TEST_F(RankedEvaluation, OfATaskHasTheSameBitsInAllWorlds) {
  write_file(path("config.yaml"), R"(
name: recall
device: cpu
model: {layers: 1, width: 16, inner: 32, heads: 1, vocab: 64}
train: {sequence_length: 32, micro_batch: 16, batch: 16}
data: {task: {type: mqar, pairs: 4, examples: 256, eval_examples: 70}}
stages: [{name: train, length: 2 steps}]
)");
  ASSERT_EQ(run(training("run")), 0) << output_;
  expect_equal_in_all_worlds({});
}

TEST_F(RankedEvaluation, OfAttentionIsDoneByOneRank) {
  train();
  const std::vector<std::string> arguments = {
      "eval",  "--checkpoint", path("run"), "--attention-maps", path("maps"), "--token-ids",
      "3,4,5", "--device",     "cpu"};
  run_job(std::vector<std::vector<std::string>>(2, arguments));
  EXPECT_EQ(codes_[0], 0) << outputs_[0];
  EXPECT_EQ(codes_[1], 0) << outputs_[1];
  EXPECT_TRUE(std::filesystem::exists(path("maps")));
}

// A build for GPUs tells why it runs on the CPU.
TEST_F(RankedEvaluation, OnlyRank0TellsWhatGoesOn) {
  train();
  environment_["CUDA_VISIBLE_DEVICES"] = "";
  run_job(std::vector<std::vector<std::string>>(3, {"eval", "--checkpoint", path("run")}));
  EXPECT_EQ(codes_, (std::vector<int>{0, 0, 0})) << outputs_[0];
  EXPECT_TRUE(says(outputs_[0], "perplexity")) << outputs_[0];
  EXPECT_EQ(outputs_[1], "");
  EXPECT_EQ(outputs_[2], "");
}

#ifdef SBTRAIN_MPIRUN
TEST_F(RankedEvaluation, RunsUnderMpirun) {
  train();
  const std::vector<std::string> arguments = evaluation({"--device", "cpu", "--recall"});
  ASSERT_EQ(run(arguments), 0) << output_;
  for (const char* world : {"2", "4"}) {
    std::vector<std::string> line = {SBTRAIN_MPIRUN, "--oversubscribe", "--allow-run-as-root", "-n",
                                     world};
    for (const std::string& word : command(arguments)) line.push_back(word);
    std::map<std::string, std::string> environment = environment_;
    environment.merge(rank_environment());
    Process process(line, folder_ / "log", environment);
    EXPECT_EQ(process.wait(), 0) << process.output();
    EXPECT_EQ(process.output(), output_);
  }
}
#endif

// Which starts runs itself: those of several ranks would meet in each other's jobs.
TEST_F(Job, ASweepIsNoJobOfManyRanks) {
  write_file(path("sweep.yaml"),
             "name: sweep\nvariants: [{name: a, config: config.yaml}]\ngrid: {train.lr: [1e-3]}\n");
  const std::vector<std::string> arguments = {"sweep", path("sweep.yaml"), "--out", path("runs")};
  run_job({arguments, arguments});
  EXPECT_EQ(codes_, (std::vector<int>{2, 2}));
  EXPECT_TRUE(says(outputs_[0], "torchrun has started 2 ranks of this sweep")) << outputs_[0];
  EXPECT_FALSE(fs::exists(path("runs"))) << outputs_[0];
}

TEST_F(Job, RanksOnTheCpuNeedALauncher) {
  EXPECT_EQ(run(training("run", {"--train.gpus=3"})), 3);
  EXPECT_TRUE(says(output_, "train.gpus: 3")) << output_;
  EXPECT_TRUE(says(output_, "mpirun -n 3")) << output_;
}

TEST_F(Job, VariablesThatContradictEachOtherAreRefused) {
  environment_["RANK"] = "2";
  environment_["WORLD_SIZE"] = "2";
  EXPECT_EQ(run(training("run")), 2);
  EXPECT_TRUE(says(output_, "RANK=2")) << output_;
}

}  // namespace
}  // namespace sbtrain::test
