// The threads that work on one tile, and their barrier. Code that is given a group runs unchanged
// in a kernel whose blocks are one group and in a warp-specialised one, where a block has several
// groups, each with a named barrier of its own.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// The unsigned division needs no correction for negative numbers.
__device__ __forceinline__ int warp_of(int thread) {
  return static_cast<int>(static_cast<unsigned>(thread) / 32);
}

// All threads of a block.
template <int kSize>
struct BlockThreads {
  static constexpr int kThreads = kSize;
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int warp() const { return warp_of(thread()); }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  // Whether x holds for all threads; this is a barrier too.
  __device__ __forceinline__ bool all(bool x) const { return __syncthreads_and(x) != 0; }
};

// A barrier of kSize threads of a block, whole warps, that pass the same id, 1 to 15 (barrier 0 is
// __syncthreads()).
template <int kSize>
__device__ __forceinline__ void sync_threads(int id) {
  static_assert(kSize % 32 == 0);
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(kSize) : "memory");
}

// kSize threads of a block from thread `first` on, whole warps, with the named barrier `id`.
template <int kSize>
struct NamedThreads {
  static constexpr int kThreads = kSize;
  int id, first;
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x) - first; }
  __device__ __forceinline__ int warp() const { return warp_of(thread()); }
  __device__ __forceinline__ void sync() const { sync_threads<kSize>(id); }
  __device__ __forceinline__ bool all(bool x) const {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.and.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(result)
        : "r"(id), "n"(kSize), "r"(static_cast<uint32_t>(x))
        : "memory");
    return result != 0;
  }
};

}  // namespace sbtrain::kernels
