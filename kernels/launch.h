// Helpers that every launch of a kernel shares.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/errors.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// To be called right after a launch: throws if the GPU refused the launch's configuration.
inline void check_launch(const char* kernel) {
  check_cuda(kernel, cudaGetLastError());
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline unsigned blocks(int64_t work, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(work, per_block));
}

// Whether every row can be read in vectors of kWidth elements, 16 bytes at most: base and row
// stride fit. The caller checks the number of columns.
template <int kWidth, typename T>
bool vectors_fit(Matrix<T> x) {
  constexpr size_t kBytes = sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16;
  return reinterpret_cast<uintptr_t>(x.data) % kBytes == 0 &&
         static_cast<size_t>(x.stride) * sizeof(T) % kBytes == 0;
}
template <int kWidth, typename T>
bool vectors_fit(T* row) {
  return vectors_fit<kWidth>(Matrix<T>{row, 0});
}
template <int kWidth, typename First, typename... Others>
bool vectors_fit(First first, Others... others) requires(sizeof...(others) > 0) {
  return vectors_fit<kWidth>(first) && vectors_fit<kWidth>(others...);
}

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Calls launch(Int<kWidth>) if vectors can be used, else launch(Int<1>).
template <int kWidth, typename Launch>
void with_width(bool vectors, Launch&& launch) {
  if (vectors) {
    launch(Int<kWidth>{});
  } else {
    launch(Int<1>{});
  }
}

}  // namespace sbtrain::kernels
