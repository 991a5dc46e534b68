// Jobs of several processes as the command line starts and ends them.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <csignal>
#include <memory>
#include <optional>

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

  // The variables of a task of `srun`: two tasks on each of two machines, which are both this one.
  std::map<std::string, std::string> task(int rank, int machine, int task_of_machine, int port) {
    std::map<std::string, std::string> variables = environment_;
    variables.insert({{"SLURM_JOB_ID", "17"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", std::to_string(rank)},
                      {"SLURM_LOCALID", std::to_string(task_of_machine)},
                      {"SLURM_NODEID", std::to_string(machine)},
                      {"SLURM_STEP_NUM_TASKS", "4"},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)}});
    return variables;
  }
  using Tasks = std::vector<std::pair<int, int>>;  // machine and task of each rank
  std::vector<std::unique_ptr<Process>> start_tasks(const Tasks& tasks,
                                                    const std::vector<std::string>& arguments) {
    const int port = free_port();
    std::vector<std::unique_ptr<Process>> processes;
    for (const auto& [machine, place] : tasks) {
      const auto rank = static_cast<int>(processes.size());
      processes.push_back(std::make_unique<Process>(command(arguments),
                                                    folder_ / fmt::format("log{}", rank),
                                                    task(rank, machine, place, port)));
    }
    return processes;
  }
  // Within `seconds` each, far below the time that ranks wait for others.
  void wait_for(const std::vector<std::unique_ptr<Process>>& processes, double seconds = 20) {
    codes_.clear();
    outputs_.clear();
    for (const auto& process : processes) {
      codes_.push_back(process->wait(seconds));
      outputs_.push_back(process->output());
    }
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

TEST_F(Job, TasksThatSlurmDealsOutInTurnAreRefusedTogether) {
  wait_for(start_tasks({{0, 0}, {1, 0}, {0, 1}, {1, 1}}, training("run")));
  EXPECT_EQ(codes_, (std::vector<int>{2, 2, 2, 2}));
  EXPECT_TRUE(says(outputs_[0], "--distribution=block")) << outputs_[0];
  EXPECT_EQ(outputs_[1] + outputs_[2] + outputs_[3], "");
}

#ifdef SBTRAIN_MPIRUN
TEST_F(Job, TasksOnTheCpuNeedPmix) {
  wait_for(start_tasks({{0, 0}, {0, 1}, {1, 0}, {1, 1}}, training("run", {"--train.batch=8"})));
  EXPECT_EQ(codes_, (std::vector<int>{2, 2, 2, 2}));
  EXPECT_TRUE(says(outputs_[0], "srun --mpi=pmix")) << outputs_[0];
  EXPECT_EQ(outputs_[1] + outputs_[2] + outputs_[3], "");
}
#endif

// Another program has the variables of rank 0, and ends without having listened; or it has ended
// already.
TEST_F(Job, RanksOnItsMachineNoticeThatRankZeroHasEnded) {
  for (const bool comes : {true, false}) {
    const int port = free_port();
    std::optional<Process> zero;
    const auto begin = std::chrono::steady_clock::now();
    if (comes) {
      zero.emplace(std::vector<std::string>{"sleep", "6"}, folder_ / "log0", task(0, 0, 0, port));
    }
    Process one(command(training("run")), folder_ / "log1", task(1, 0, 1, port));
    EXPECT_EQ(one.wait(20), 7);
    EXPECT_TRUE(says(one.output(), "rank 0 has ended before it listened")) << one.output();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    // Three seconds of patience and two looks, or two looks after its end, and what a busy machine
    // takes to start a program: far from the rendezvous timeout in any case.
    EXPECT_GT(took.count(), comes ? 6.0 : 2.0);
    EXPECT_LT(took.count(), comes ? 13.0 : 10.0);
  }
}

// Nobody knows when somebody who sets the variables by hand will start rank 0.
TEST_F(Job, RankZeroMayBeStartedLater) {
  const int port = free_port();
  const auto start = [&](const char* rank) {
    std::map<std::string, std::string> variables = environment_;
    variables.insert({{"RANK", rank},
                      {"LOCAL_RANK", rank},
                      {"WORLD_SIZE", "2"},
                      {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)}});
    return std::make_unique<Process>(command({"eval", "--checkpoint", path("none")}),
                                     folder_ / (std::string("log") + rank), variables);
  };
  const auto one = start("1");
  std::this_thread::sleep_for(std::chrono::seconds(7));
  EXPECT_TRUE(one->running()) << one->output();
  const auto zero = start("0");
  EXPECT_EQ(zero->wait(20), one->wait(20));
  EXPECT_EQ(one->output(), "");  // they have met, and rank 0 has said what is wrong
}

// A stop while ranks are awaited: with rank 0, whose logs say so, and without.
TEST_F(Job, AStopIsHeardWhileRanksAreAwaited) {
  const auto processes = start_tasks({{0, 0}, {0, 1}}, training("run"));
  const auto logged = [&](int rank) {
    return read_file(path("run") + fmt::format("/logs/rank-{:05}.log", rank));
  };
  std::this_thread::sleep_for(std::chrono::seconds(2));
  for (const auto& process : processes) process->signal(SIGTERM);
  wait_for(processes);
  EXPECT_EQ(codes_, (std::vector<int>{85, 85}));
  EXPECT_TRUE(says(outputs_[0], "asked to stop")) << outputs_[0];
  EXPECT_FALSE(says(outputs_[0], "error")) << outputs_[0];
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(says(logged(rank), "this rank ends with exit code 85: ")) << logged(rank);
  }
  Process alone(command(training("run")), folder_ / "log", task(1, 0, 1, free_port()));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  alone.signal(SIGTERM);
  EXPECT_EQ(alone.wait(20), 85) << alone.output();
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
      {"--lengths", "16,48", "--same-targets", "8", "--bootstrap", "50"},
      {"--lengths", "48", "--tokens-per-length", "200", "--bootstrap", "0"},
      {"--benefit", "128", "--benefit-targets", "8", "--bootstrap", "50"},
      {"--window", "32", "--stride", "5", "--recall"}};
  for (const std::vector<std::string>& kind : kinds) {
    SCOPED_TRACE(kind.front());
    expect_equal_in_all_worlds(kind);
  }
  expect_equal_in_all_worlds({"--reach", "--lengths", "16,48"}, "\"reach\"");
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
