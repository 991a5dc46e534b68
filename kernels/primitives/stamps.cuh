// Time stamps of the blocks of a kernel, for builds with -DSBTRAIN_KERNEL_STAMPS=ON; elsewhere
// nothing of it is compiled. tests/bench/kernel_stamps.py shows what they say.
//
// A thread of each block takes up to six times with Stamps::take(), in nanoseconds of a clock that
// all multiprocessors share, and keeps them with keep(). A program that is given the environment
// variable KERNEL_STAMPS=PATH writes them to PATH.NAME when it ends: the number of blocks that ran
// (uint32), then a Stamp for each of the first 2^22.
#pragma once

#include <cstdint>

#ifdef SBTRAIN_KERNEL_STAMPS
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#endif

namespace sbtrain::kernels {

#ifdef SBTRAIN_KERNEL_STAMPS

struct Stamp {
  uint64_t at[6];
  int32_t n, k;  // what says which kernel it is
  int32_t block, padding;
};
inline constexpr uint32_t kMostStamps = 1u << 22;
static __device__ Stamp kept_stamps[kMostStamps];  // of the kernels of one source file
static __device__ uint32_t stamp_count;

class Stamps {
 public:
  __device__ __forceinline__ void take(int i) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(stamp_.at[i])::"memory");
  }
  // By one thread of the block.
  __device__ __forceinline__ void keep(int64_t n, int64_t k) {
    const uint32_t place = atomicAdd(&stamp_count, 1u);
    if (place >= kMostStamps) return;
    stamp_.n = static_cast<int32_t>(n);
    stamp_.k = static_cast<int32_t>(k);
    stamp_.block =
        static_cast<int32_t>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    kept_stamps[place] = stamp_;
  }

 private:
  Stamp stamp_ = {};
};

// The stamps of this source file go to PATH.NAME. Called before its first launch.
static void write_stamps_at_exit(const char* name) {
  static std::string path;
  const char* prefix = std::getenv("KERNEL_STAMPS");
  if (prefix == nullptr || !path.empty()) return;
  path = std::string(prefix) + "." + name;
  std::atexit([] {
    uint32_t count = 0;
    std::vector<Stamp> stamps(kMostStamps);
    cudaDeviceSynchronize();
    if (cudaMemcpyFromSymbol(&count, stamp_count, sizeof count) != cudaSuccess ||
        cudaMemcpyFromSymbol(stamps.data(), kept_stamps, sizeof(Stamp) * stamps.size()) !=
            cudaSuccess) {
      return;
    }
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) return;
    std::fwrite(&count, sizeof count, 1, file);
    std::fwrite(stamps.data(), sizeof(Stamp), stamps.size(), file);
    std::fclose(file);
  });
}

#else

class Stamps {
 public:
  __device__ __forceinline__ void take(int) {}
  __device__ __forceinline__ void keep(int64_t, int64_t) {}
};
inline void write_stamps_at_exit(const char*) {}

#endif

}  // namespace sbtrain::kernels
