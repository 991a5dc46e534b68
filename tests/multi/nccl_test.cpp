// Ranks on GPUs: the checks of communicators, and ranks that fail. On a machine with one GPU the
// ranks share it, as two nodes that talk over the network; a collective then takes much longer.
#include <arpa/inet.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "core/device.h"
#include "multi/digest.h"
#include "support/process.h"

namespace sbtrain::test {
namespace {

int visible_devices() {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  return devices;
}

// Up to four GPUs have a rank each.
int world() {
  return std::clamp(visible_devices(), 2, 4);
}

int free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  close(listener);
  return ntohs(address.sin_port);
}

// One process a rank, with the variables of torchrun.
class Ranks {
 public:
  explicit Ranks(std::vector<std::string> command, int count = world()) {
    const std::string port = std::to_string(free_port());
    const std::string size = std::to_string(count);
    for (int rank = 0; rank < count; ++rank) {
      std::map<std::string, std::string> environment = {
          {"RANK", std::to_string(rank)},       {"WORLD_SIZE", size},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", size},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", port}};
      if (visible_devices() < 2) {
        environment.insert({{"NCCL_HOSTID", fmt::format("node{}", rank)},
                            {"NCCL_NET", "Socket"},
                            {"NCCL_SOCKET_IFNAME", "lo"}});
      }
      ranks_.push_back(
          std::make_unique<Process>(command, folder_ / fmt::format("rank{}", rank), environment));
    }
  }
  Process& operator[](int rank) { return *ranks_.at(rank); }

 private:
  TemporaryFolder folder_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!cuda_available(&why)) GTEST_SKIP() << "no GPU: " << why;
  }
};

TEST_F(Nccl, PassesTheChecksOfCommunicators) {
  Ranks ranks({SBTRAIN_RANK, "checks", "cuda"});
  for (int rank = 0; rank < world(); ++rank) {
    EXPECT_EQ(ranks[rank].wait(300), 0) << ranks[rank].output();
  }
}

// What an optimizer makes of the same weights and gradients is the same for every number of ranks.
TEST_F(Nccl, UpdatesHaveTheSameBitsInEveryWorld) {
  if (visible_devices() < 2) GTEST_SKIP() << "one GPU";
  struct Case {
    int world;
    const char *sharding, *engine;
  };
  std::vector<Case> cases = {{1, "full", "multiprocessors"},
                             {2, "full", "multiprocessors"},
                             {2, "grad", "multiprocessors"},
                             {2, "none", "multiprocessors"},
                             {2, "full", "copy_engines"}};
  if (world() == 4) {
    cases.insert(cases.end(), {{4, "full", "multiprocessors"},
                               {4, "none", "multiprocessors"},
                               {4, "full", "copy_engines"}});
  }
  for (const char* optimizer : {"adamw", "muon"}) {
    std::string first;
    for (const Case& c : cases) {
      const TemporaryFolder folder;
      Ranks ranks({SBTRAIN_RANK, "update", "cuda", optimizer, c.sharding, c.engine, folder.path()},
                  c.world);
      for (int rank = 0; rank < c.world; ++rank) {
        ASSERT_EQ(ranks[rank].wait(120), 0) << ranks[rank].output();
      }
      const std::string digest = digest_in(ranks[0].output());
      if (first.empty()) first = digest;
      EXPECT_EQ(digest, first) << fmt::format("{}, {} of {}, {}", optimizer, c.sharding, c.world,
                                              c.engine);
    }
  }
}

// Rank 1 fails; rank 0 must end, and know why.
void expect_end(const std::string& fault, int code, const std::string& message) {
  Ranks ranks({SBTRAIN_RANK, "fault", "cuda", fault});
  EXPECT_EQ(ranks[0].wait(60), code) << ranks[0].output();
  EXPECT_NE(ranks[0].output().find(message), std::string::npos) << ranks[0].output();
}

TEST_F(Nccl, AKilledRankEndsTheJob) {
  expect_end("kill", 7, "rank 1");
}
// The copy engines of one GPU write into the memory of another one, whose process is gone.
TEST_F(Nccl, ARankThatIsKilledInAnExchangeOfCopyEnginesEndsTheJob) {
  if (visible_devices() < 2) GTEST_SKIP() << "one GPU";
  for (int i = 0; i < 10; ++i) expect_end("exchange", 7, "rank 1");
}
TEST_F(Nccl, ARankThatLeavesEndsTheJob) {
  expect_end("leave", 7, "rank 1");
}
TEST_F(Nccl, AnErrorOfOneRankIsEveryRanks) {
  expect_end("throw", 4, "shard 3 is damaged");
}
TEST_F(Nccl, AStoppedRankEndsTheJobAtItsDeadline) {
  expect_end("stop", 7, "no answer from rank 1");
}
TEST_F(Nccl, ARankThatHangsEndsTheJobAtItsDeadline) {
  expect_end("hang", 7, "no progress");
}

}  // namespace
}  // namespace sbtrain::test
