// What nvcc declares before the first line of a source file, for GCC: the keywords of CUDA and the
// functions that the kernels use. The build includes it ahead of everything else.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation/emulator.h"

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Variables of a function and, with extern, of a namespace can be thread_local alike. All fibers of
// a block run on one thread of the CPU, so they share them.
#define __shared__ thread_local
#define __CUDA_ARCH_FEAT_SM90_ALL 1

#define threadIdx (::sbtrain::emulation::thread_index())
#define blockIdx (::sbtrain::emulation::block_index())
#define blockDim (::sbtrain::emulation::block_size())
#define gridDim (::sbtrain::emulation::grid_size())

using std::max;
using std::min;

namespace sbtrain::kernels {
// Dynamic shared memory. Addresses of shared memory are bytes from its begin on.
inline constexpr int kMaxSharedBytes = 232448;
extern thread_local unsigned char memory[kMaxSharedBytes];
}  // namespace sbtrain::kernels

namespace sbtrain::emulation {

// The first bytes of `from`; bytes that it lacks are zero.
template <typename To, typename From>
To bits_as(const From& from) {
  To to{};
  std::memcpy(static_cast<void*>(&to), &from, std::min(sizeof(To), sizeof(From)));
  return to;
}
// x of the given lane.
template <typename T>
T of_lane(T x, int lane) {
  return bits_as<T>(exchange(bits_as<uint64_t>(x))[lane]);
}
inline void check(bool condition, const char* what) {
  if (!condition) throw KernelError(what);
}

}  // namespace sbtrain::emulation

template <typename T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  const int first = sbtrain::emulation::lane_index() / width * width;
  return sbtrain::emulation::of_lane(x, first + lane % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return sbtrain::emulation::of_lane(x, sbtrain::emulation::lane_index() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int distance, int width) {
  const int lane = sbtrain::emulation::lane_index();
  return sbtrain::emulation::of_lane(x, lane % width >= distance ? lane - distance : lane);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int distance, int width) {
  const int lane = sbtrain::emulation::lane_index();
  return sbtrain::emulation::of_lane(x, lane % width + distance < width ? lane + distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* const all = sbtrain::emulation::exchange(x ? 1 : 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline int __all_sync(unsigned mask, bool x) {
  return __ballot_sync(mask, x) == ~0u;
}
inline int __any_sync(unsigned mask, bool x) {
  return __ballot_sync(mask, x) != 0;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const uint64_t* const all = sbtrain::emulation::exchange(x);
  return static_cast<unsigned>(*std::min_element(all, all + 32));
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const uint64_t* const all = sbtrain::emulation::exchange(x);
  return static_cast<unsigned>(*std::max_element(all, all + 32));
}
inline void __syncwarp() {
  sbtrain::emulation::exchange(0);
}
inline void __syncthreads() {
  const sbtrain::emulation::Index& size = sbtrain::emulation::block_size();
  sbtrain::emulation::barrier(0, static_cast<int>(size.x * size.y * size.z));
}
inline int __syncthreads_and(int x) {
  const sbtrain::emulation::Index& size = sbtrain::emulation::block_size();
  return sbtrain::emulation::barrier(0, static_cast<int>(size.x * size.y * size.z), x != 0) ? 1 : 0;
}
[[noreturn]] inline void __trap() {
  throw sbtrain::emulation::KernelError("the kernel has called __trap()");
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline float __uint_as_float(unsigned x) {
  return sbtrain::emulation::bits_as<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return sbtrain::emulation::bits_as<unsigned>(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline void __threadfence() {}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
T atomicAdd(T* p, T x) {
  const T before = *p;
  *p += x;
  return before;
}
inline int atomicMin(int* p, int x) {
  const int before = *p;
  *p = std::min(before, x);
  return before;
}
inline int atomicMax(int* p, int x) {
  const int before = *p;
  *p = std::max(before, x);
  return before;
}
