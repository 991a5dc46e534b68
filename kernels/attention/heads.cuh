// Where one head of a problem lies: matrices [T, H*d] whose rows may be strided, and numbers for
// each query, [H, T].
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sbtrain::kernels {

template <typename Problem>
struct Head {
  __device__ __forceinline__ Head(const Problem& p, int index) : p(p), index(index) {}
  // The head's part of a row of x, which has data and stride.
  template <typename Matrix>
  __device__ __forceinline__ __nv_bfloat16* row(const Matrix& x, int row) const {
    return x.data + row * x.stride + index * p.head_dim;
  }
  // The number of query `row`.
  __device__ __forceinline__ int64_t at(int row) const {
    return static_cast<int64_t>(index) * p.tokens + row;
  }
  const Problem& p;
  int index;
};

}  // namespace sbtrain::kernels
