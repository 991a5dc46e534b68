// Exchange between the lanes of a warp. A quad is the four lanes 4g .. 4g + 3, which share the rows
// of a tensor core's accumulator.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// The remainders are those of unsigned numbers: such need no correction for negative ones.
__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ __forceinline__ int quad_lane() {
  return static_cast<int>(threadIdx.x % 4);
}

// x, which is the same in all lanes of the warp, in a form that lets the compiler know it: what
// follows from such values alone costs no vector registers.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

// Every lane of the quad gets the result.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The value of the lane `distance` further right in the quad, or `outside` if there is none.
__device__ __forceinline__ float from_right(float x, int distance, float outside) {
  const float y = __shfl_down_sync(~0u, x, distance, 4);
  return quad_lane() + distance < 4 ? y : outside;
}
// The same of the lane further left.
__device__ __forceinline__ float from_left(float x, int distance, float outside) {
  const float y = __shfl_up_sync(~0u, x, distance, 4);
  return quad_lane() >= distance ? y : outside;
}

// Lane n holds the value of row n of a warp's accumulator, of at most 32 rows. Each lane gets the
// value of its row i, which is row lane_row() + 8 i (accumulator.cuh).
template <typename T>
__device__ __forceinline__ T of_lane_row(T x, int i) {
  return __shfl_sync(~0u, x, lane() / 4 + i * 8);
}

// The minimum over the warp of numbers that are not negative, whose order is that of their bits.
__device__ __forceinline__ float warp_min(float x) {
  return __uint_as_float(__reduce_min_sync(~0u, __float_as_uint(x)));
}
__device__ __forceinline__ float warp_max(float x) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

}  // namespace sbtrain::kernels
