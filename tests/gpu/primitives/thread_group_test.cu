#include "gpu/device.h"
#include "kernels/primitives/thread_group.cuh"

namespace sbtrain::test::thread_group_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using ThreadGroup = GpuTest;

constexpr int kSize = 96;  // of a group: three warps
constexpr int kGroups = 3;

// A number travels through the group, one thread per round: each thread reads what its neighbour
// wrote before the barrier. Groups pass different numbers of barriers. Then each group takes votes
// of its own.
template <typename Group>
__device__ void pass_on(const Group& group, int* shared, int rounds, int* out, int* votes,
                        bool vote) {
  const int i = group.thread();
  int mine = i;
  for (int n = 0; n < rounds; ++n) {
    shared[i] = mine;
    group.sync();
    mine = shared[(i + 1) % kSize];
    group.sync();
  }
  out[i] = mine;
  votes[2 * i] = group.all(vote);
  votes[2 * i + 1] = group.all(true);
}

__global__ void named_kernel(int* out, int* votes, int dissenter) {
  __shared__ int shared[kGroups * kSize];
  const int index = static_cast<int>(threadIdx.x) / kSize;
  const NamedThreads<kSize> group{index + 1, index * kSize};
  pass_on(group, shared + index * kSize, 5 + 7 * index, out + index * kSize,
          votes + 2 * index * kSize, static_cast<int>(threadIdx.x) != dissenter);
}

__global__ void block_kernel(int* out, int* votes, int dissenter) {
  __shared__ int shared[kSize];
  pass_on(BlockThreads<kSize>(), shared, 11, out, votes,
          static_cast<int>(threadIdx.x) != dissenter);
}

// Checks the numbers and votes of one group after `rounds` rounds.
void expect_passed_on(const int* out, const int* votes, int rounds, bool unanimous) {
  for (int i = 0; i < kSize; ++i) {
    EXPECT_EQ(out[i], (i + rounds) % kSize) << i;
    EXPECT_EQ(votes[2 * i], unanimous ? 1 : 0) << i;
    EXPECT_EQ(votes[2 * i + 1], 1) << i;
  }
}

TEST_F(ThreadGroup, NamedBarriersAreIndependent) {
  for (const int dissenter : {-1, 0, kSize - 1, kSize, 2 * kSize + 40}) {
    OnDevice<int> out(kGroups * kSize), votes(2 * kGroups * kSize);
    named_kernel<<<1, kGroups * kSize>>>(out.data(), votes.data(), dissenter);
    const std::vector<int> passed = out.values(), voted = votes.values();
    for (int g = 0; g < kGroups; ++g) {
      expect_passed_on(passed.data() + g * kSize, voted.data() + 2 * g * kSize, 5 + 7 * g,
                       dissenter < 0 || dissenter / kSize != g);
    }
  }
}

TEST_F(ThreadGroup, ABlockIsAGroup) {
  for (const int dissenter : {-1, 0, 50, kSize - 1}) {
    OnDevice<int> out(kSize), votes(2 * kSize);
    block_kernel<<<1, kSize>>>(out.data(), votes.data(), dissenter);
    expect_passed_on(out.values().data(), votes.values().data(), 11, dissenter < 0);
  }
}

}  // namespace
}  // namespace sbtrain::test::thread_group_test
