// Memory limits of the host, read from a made-up /proc and /sys.
#include "core/host_memory.h"

#include <gtest/gtest.h>

#include "core/device.h"
#include "core/error.h"
#include "core/memory_check.h"
#include "support/process.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
constexpr size_t kMiB = size_t{1} << 20;

class HostMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    put("proc/meminfo",
        "MemTotal:       8192 kB\nMemFree:  1024 kB\nMemAvailable:   6144 kB\n"
        "CommitLimit:    5120 kB\nCommitted_AS:   1024 kB\n");
    put("proc/self/status", "Name:\tx\nVmSize:\t  2048 kB\nVmData:\t  1024 kB\n");
  }
  void put(const std::string& name, const std::string& text) {
    fs::create_directories((root_ / name).parent_path());
    test::write_file(root_ / name, text);
  }
  // A group of version 2 that may use `max` and uses `current`, of which 64 KiB are cache.
  void group(const std::string& folder, const std::string& max, size_t current,
             const std::string& high = "max") {
    put(folder + "/memory.max", max + "\n");
    put(folder + "/memory.high", high + "\n");
    put(folder + "/memory.current", std::to_string(current) + "\n");
    put(folder + "/memory.stat", "anon 1\ninactive_file 32768\nactive_file 32768\n");
  }
  void mounted(const std::string& group_path, const std::string& mounted_root) {
    put("proc/self/cgroup", "0::" + group_path + "\n");
    put("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/root rw\n30 22 0:26 " + mounted_root +
                                   " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  }
  HostMemory read() const { return host_memory(root_.path()); }

  test::TemporaryFolder root_;
};

TEST_F(HostMemoryTest, IsWhatTheMachineHasAvailable) {
  const HostMemory memory = read();
  EXPECT_EQ(memory.free, 6 * kMiB);
  EXPECT_EQ(memory.total, 8 * kMiB);
  EXPECT_EQ(memory.limit, "the machine");
}

TEST_F(HostMemoryTest, KnowsTheCommitLimitWhereItIsStrict) {
  put("proc/sys/vm/overcommit_memory", "0\n");
  EXPECT_EQ(read().free, 6 * kMiB);
  put("proc/sys/vm/overcommit_memory", "2\n");
  EXPECT_EQ(read().free, 4 * kMiB);
}

TEST_F(HostMemoryTest, IsWhatTheGroupLeaves) {
  mounted("/job", "/");
  group("sys/fs/cgroup/job", std::to_string(4 * kMiB), 1 * kMiB);
  const HostMemory memory = read();
  EXPECT_EQ(memory.free, 3 * kMiB + 65536);  // the cache can be dropped
  EXPECT_EQ(memory.total, 4 * kMiB);
  EXPECT_EQ(memory.limit, "cgroup /job (memory.max)");
}

TEST_F(HostMemoryTest, IsWhatTheGroupsAroundLeaveToo) {
  mounted("/a/b/c", "/");
  group("sys/fs/cgroup/a/b/c", "max", 0);
  group("sys/fs/cgroup/a/b", std::to_string(5 * kMiB), 4 * kMiB);
  group("sys/fs/cgroup/a", std::to_string(6 * kMiB), 4 * kMiB);
  HostMemory memory = read();
  EXPECT_EQ(memory.free, 1 * kMiB + 65536);
  EXPECT_EQ(memory.limit, "cgroup /a/b (memory.max)");
  group("sys/fs/cgroup/a", "max", 4 * kMiB, std::to_string(3 * kMiB));
  memory = read();
  EXPECT_EQ(memory.free, 0U);  // more is in use than it may
  EXPECT_EQ(memory.limit, "cgroup /a (memory.high)");
}

TEST_F(HostMemoryTest, FindsTheGroupThatAContainerMounts) {
  mounted("/docker/1234/job", "/docker/1234");
  group("sys/fs/cgroup/job", std::to_string(2 * kMiB), 0);
  group("sys/fs/cgroup", std::to_string(4 * kMiB), 3 * kMiB);
  EXPECT_EQ(read().free, 1 * kMiB + 65536);
  mounted("/../../elsewhere", "/");  // as another namespace sees it
  EXPECT_EQ(read().free, 1 * kMiB + 65536);
}

TEST_F(HostMemoryTest, ReadsVersionOne) {
  put("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job/step\n0::/x\n");
  put("proc/self/mountinfo",
      "31 22 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
      "32 22 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  const std::string job = "sys/fs/cgroup/memory/job";
  put(job + "/step/memory.limit_in_bytes", "9223372036854771712\n");
  put(job + "/step/memory.usage_in_bytes", "1\n");
  put(job + "/memory.limit_in_bytes", std::to_string(5 * kMiB) + "\n");
  put(job + "/memory.usage_in_bytes", std::to_string(3 * kMiB) + "\n");
  put(job + "/memory.stat", "inactive_file 4096\ntotal_inactive_file 4096\n");
  EXPECT_EQ(read().free, 2 * kMiB + 4096);
  EXPECT_EQ(read().limit, "cgroup /job (memory.limit_in_bytes)");
}

TEST_F(HostMemoryTest, WithoutAnyLimitIsEndless) {
  fs::remove_all(root_ / "proc");
  EXPECT_EQ(read().free, SIZE_MAX);
  put("proc/meminfo", "nonsense\n");
  put("proc/self/cgroup", "::\n:\n4\n0::\n");
  put("proc/self/mountinfo", "-\n - \n30 22\n");
  EXPECT_EQ(read().free, SIZE_MAX);
}

TEST(HostMemory, OfThisMachineIsPlausible) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.free, 16 * kMiB);
  EXPECT_LE(memory.free, memory.total);
  EXPECT_FALSE(memory.limit.empty());
}

TEST(MemoryCheck, RefusesAPlanBeyondTheMachine) {
  MemoryReport plan;
  plan.persistent[0] = size_t{1} << 50;
  try {
    require_memory(Backend::kCpu, plan, "the run", "Lower it.");
    FAIL() << "a plan of a petabyte was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kOutOfMemory);
    const std::string message = error.what();
    EXPECT_NE(message.find("the run needs 1048576.00 GiB"), std::string::npos) << message;
    EXPECT_NE(message.find("weights"), std::string::npos) << message;
    EXPECT_NE(message.find("Lower it."), std::string::npos) << message;
  }
  require_memory(Backend::kPlan, plan, "the run", "");
  plan.persistent[0] = kMiB;
  require_memory(Backend::kCpu, plan, "the run", "");
}

TEST(MemoryCheck, RefusesTensorsWhoseSizeOverflows) {
  Memory plan = Memory::planning(Target(Backend::kCpu));
  for (const int64_t size : {int64_t{1} << 32, int64_t{1} << 62, INT64_MAX}) {
    EXPECT_THROW(plan.allocate(MemoryClass::kInputs, "x", DType::kF32, {size, size}), Error);
    EXPECT_THROW(plan.allocate(MemoryClass::kInputs, "x", DType::kF32, {2, size, 8192}), Error);
  }
  EXPECT_EQ(plan.allocate(MemoryClass::kInputs, "x", DType::kF32, {0, 4}).tensor().bytes(), 0U);
}

TEST(MemoryCheck, AnAllocationBeyondTheMachineFailsAtOnce) {
  EXPECT_EQ(device_allocate(Backend::kCpu, size_t{1} << 46), nullptr);
}

}  // namespace
}  // namespace sbtrain
