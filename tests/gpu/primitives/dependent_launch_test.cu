// Kernels that begin early see all that the kernels before them have written.
#include <gtest/gtest.h>

#include <vector>

#include "gpu/device.h"
#include "kernels/primitives/dependent_launch.cuh"

namespace sbtrain::test::dependent_launch_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using DependentLaunch = GpuTest;

constexpr int kThreads = 128;
constexpr int kBlocks = 600;  // more than run at once with as many that wait
constexpr int kCount = kThreads * kBlocks;

// y[i] = 1 + the element of x that another block has written, late.
__global__ void add_one_kernel(int* y, const int* x) {
  let_next_kernel_begin();
  if (threadIdx.x == 0) prefetch_to_l2(x + blockIdx.x * kThreads, kThreads * sizeof(int));
  wait_for_previous_kernel();
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int value = x[kCount - 1 - i];
  if (blockIdx.x % 7 == 0) __nanosleep(2000);
  y[i] = value + 1;
}

TEST_F(DependentLaunch, EachKernelSeesTheOneBefore) {
  constexpr int kSteps = 201;  // an odd number, so that both buffers change
  const OnDevice<int> a(std::vector<int>(kCount, 0));
  const OnDevice<int> b(std::vector<int>(kCount, 0));
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream));
  const auto launch_all = [&] {
    for (int n = 0; n < kSteps; ++n) {
      launch_early("add_one", /*early=*/true, stream, add_one_kernel, {dim3(kBlocks), kThreads},
                   n % 2 == 0 ? b.data() : a.data(), n % 2 == 0 ? a.data() : b.data());
    }
  };
  launch_all();
  check_cuda(cudaStreamSynchronize(stream));
  EXPECT_EQ(b.values(), std::vector<int>(kCount, kSteps));

  // The same in a graph: from the values that the first half has left.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  launch_all();
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&executable, graph, 0));
  check_cuda(cudaGraphLaunch(executable, stream));
  check_cuda(cudaStreamSynchronize(stream));
  EXPECT_EQ(b.values(), std::vector<int>(kCount, kSteps - 1 + kSteps));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace sbtrain::test::dependent_launch_test
