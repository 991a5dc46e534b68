// Vectors of neighbouring elements, read and written 16 bytes at a time.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T value[kWidth];
  __device__ T& operator[](int i) { return value[i]; }
  __device__ const T& operator[](int i) const { return value[i]; }
};

template <int kWidth, typename T>
__device__ Pack<T, kWidth> load_pack(const T* data) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(data);
}

template <typename T, int kWidth>
__device__ void store_pack(T* data, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(data) = pack;
}

inline __device__ float to_float(float x) {
  return x;
}
inline __device__ float to_float(bf16 x) {
  return __bfloat162float(x);
}

template <typename To, typename From, int kWidth>
__device__ Pack<To, kWidth> convert(const Pack<From, kWidth>& x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, float>) {
    Pack<float, kWidth> y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] = to_float(x[i]);
    return y;
  } else if constexpr (kWidth == 1) {
    return {{__float2bfloat16_rn(x[0])}};
  } else {
    Pack<bf16, kWidth> y;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {  // one instruction rounds two
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
      y[i] = pair.x;
      y[i + 1] = pair.y;
    }
    return y;
  }
}

// Loads elements of any type as f32.
template <int kWidth, typename T>
__device__ Pack<float, kWidth> load_floats(const T* data) {
  return convert<float>(load_pack<kWidth>(data));
}
// Stores f32 values in the type of `data`.
template <typename T, int kWidth>
__device__ void store_floats(T* data, const Pack<float, kWidth>& x) {
  store_pack(data, convert<T>(x));
}

// An index outside its table stops the kernel; the next synchronisation reports it.
inline __device__ void require(bool condition) {
  if (!condition) __trap();
}

// Eight neighbouring channels of a row of bf16, as they lie in memory.
struct Eight {
  uint32_t pair[4];
};

// 16 bytes from and to an address that is aligned to as many.
__device__ __forceinline__ Eight load_eight(const void* from) {
  const uint4 x = *static_cast<const uint4*>(from);
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ void store_eight(void* to, const Eight& x) {
  *static_cast<uint4*>(to) = {x.pair[0], x.pair[1], x.pair[2], x.pair[3]};
}

// Those from `channel` on; zeros beyond the last of the row's channels, where there may be NaN.
// kVectors: `channels` is a multiple of 8, and rows can be read 16 bytes at a time.
template <bool kVectors>
__device__ __forceinline__ Eight load_eight(const bf16* row, int channel, int channels) {
  Eight x{};
  if constexpr (kVectors) {
    if (channel < channels) x = load_eight(row + channel);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = channel + i < channels ? __bfloat16_as_ushort(row[channel + i]) : 0;
      x.pair[i / 2] |= bits << (16 * (i % 2));
    }
  }
  return x;
}

__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

}  // namespace sbtrain::kernels
