// Where one head of queries lies: matrices [T, H*d] whose rows may be strided, and numbers for each
// query, [H, T]; and where the head of keys and values lies that it reads, [T, H/group*d].
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sbtrain::kernels {

template <typename Problem>
struct Head {
  __device__ __forceinline__ Head(const Problem& p, int index) : Head(p, index, index / p.group) {}
  __device__ __forceinline__ Head(const Problem& p, int index, int key_index)
      : p(p), index(index), key_index(key_index) {}
  // The head's part of a row of x, which has data and stride.
  template <typename Matrix>
  __device__ __forceinline__ __nv_bfloat16* row(const Matrix& x, int row) const {
    return x.data + row * x.stride + index * p.head_dim;
  }
  // The number of query `row`.
  __device__ __forceinline__ int64_t at(int row) const {
    return static_cast<int64_t>(index) * p.tokens + row;
  }
  // The head of keys and values, for their matrices.
  __device__ __forceinline__ Head of_keys() const { return {p, key_index, key_index}; }
  const Problem& p;
  int index, key_index;
};

// The head of a block of a grid in which y counts the heads of a group and z the groups
// (query_grid), from first_head on, which has the head of keys first_key_head. So none is divided,
// and the loop over keys keeps one number, as without groups.
template <typename Problem>
__device__ __forceinline__ Head<Problem> head_of_block(const Problem& p, int first_head = 0,
                                                       int first_key_head = 0) {
  const auto member = static_cast<int>(blockIdx.y), group = static_cast<int>(blockIdx.z);
  return {p, first_head + group * p.group + member, first_key_head + group};
}

}  // namespace sbtrain::kernels
