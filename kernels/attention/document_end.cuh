#pragma once

namespace sbtrain::kernels {

// The end of the document of `token`, of a problem that has cu_seqlens [sequences + 1].
template <typename Problem>
__device__ __forceinline__ int document_end(const Problem& p, int token) {
  int low = 0, high = p.sequences;  // cu_seqlens[low] <= token < cu_seqlens[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return p.cu_seqlens[high];
}

}  // namespace sbtrain::kernels
