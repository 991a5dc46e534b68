// Runs the threads of a CUDA block on one thread of the CPU, to test the arithmetic and above all
// the waits of warp-specialised kernels without a GPU.
//
// Each CUDA thread is a fiber. A fiber runs until it waits for something that has not happened;
// then the next one runs. If all wait and nothing is left to happen, the kernel is in a deadlock,
// and the emulator throws what each warp waits for. The kernels are those of kernels/, compiled for
// the CPU; the folder kernels/ beside this file comes first in the include path and replaces the
// primitives that are made of PTX.
//
// What is emulated: named barriers and __syncthreads(), shuffles and votes, mbarriers with their
// counts of bytes, copies of boxes (TMA) with their swizzle and their zeros, products of warpgroups
// (wgmma) and the groups in which they complete. The results of copies and products appear either
// at once or as late as the kernel's waits allow (Timing), so that a wait that is missing gives
// wrong numbers in one of the two.
//
// What is not emulated: the descriptors of wgmma (tests/gpu/primitives has them), the order in
// which threads see each other's writes to memory, which fences are for, the number of registers,
// blocks that run at the same time, and speed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sbtrain::emulation {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

enum class Timing : uint8_t { kAtOnce, kLate };

// The kernel does what the hardware does not allow, or all of its threads wait.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `kernel` for all blocks of a grid, one after the other. Blocks have at most 1024 threads.
// Throws KernelError.
void run_grid(Index grid, Index block, Timing timing, const std::function<void()>& kernel);

// ---- For the code that a kernel calls -----------------------------------------------------------

const Index& thread_index();
const Index& block_index();
const Index& block_size();
const Index& grid_size();
int lane_index();

// Returns when ready() is true. `what` and `detail` describe the wait in the message of a deadlock.
void wait_until(const char* what, int64_t detail, std::function<bool()> ready);

// The 32 lanes of a warp give a value each and get those of all; the values stay valid until the
// lane calls this again. It is also the barrier of a warp.
const uint64_t* exchange(uint64_t value);
// The same with three values of each lane: those of all lanes, one list after the other.
using ThreeOfLanes = std::array<std::array<uint64_t, 32>, 3>;
const ThreeOfLanes& exchange(uint64_t x, uint64_t y, uint64_t z);

// A barrier of `threads` threads with an id from 0 to 15; whether x holds for all of them.
bool barrier(int id, int threads, bool x = true);

// Copies by the copy engine: at once, or when all threads wait.
void issue_copy(std::function<void()> copy);

// Products of the calling warp, which lane 0 issues for all. A group is complete at once, or when
// the warp waits for it; its lanes call these together.
void issue_product(std::function<void()> product);
void commit_products();
void wait_for_products(int pending);

}  // namespace sbtrain::emulation
