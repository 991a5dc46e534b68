// Copies of boxes of tensors, and additions to global memory, by the copy engine (TMA), sm_90 and
// later. tensor_map.h makes the maps that describe the tensors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/primitives/mbarrier.cuh"

namespace sbtrain::kernels {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// Copies the box that begins at the given coordinates, innermost first, to shared memory. By one
// thread; the bytes count for the barrier's current phase. Elements outside of the tensor become
// zero, and count too.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Mbarrier& barrier,
                                         int x0, int x1, int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];\n" ::"r"(shared_address(shared)),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Mbarrier& barrier,
                                         int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(shared_address(shared)),
      "l"(&map), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// Copies `bytes` consecutive bytes to shared memory. By one thread; the bytes count for the
// barrier's current phase. They are a multiple of 16, as are both addresses.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(barrier.address())
      : "memory");
}

// Adds `bytes` consecutive bytes of f32 in shared memory to as many in global memory. By one
// thread, in its current group; sizes and addresses as above. Of additions to the same place by
// several threads the order, and so the rounding, is not fixed.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(global),
      "r"(shared_address(shared)), "r"(bytes)
      : "memory");
}

// The same, but stores them.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Ends this thread's current group of additions and stores.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most the newest kGroups groups of this thread still read shared memory.
template <int kGroups>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kGroups) : "memory");
}

// Waits until all but the newest kGroups groups of this thread are complete, and visible to it.
template <int kGroups>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

// Orders what this thread wrote to shared memory before copies and products (wgmma) that read it
// after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Orders what this thread has seen or done in one of the two ways, by itself and by copies, before
// what follows in the other, in all memory.
__device__ __forceinline__ void fence_all_proxies() {
  asm volatile("fence.proxy.async;\n" ::: "memory");
}

}  // namespace sbtrain::kernels
