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
