// How attention kernels are launched: with the shared memory of their tiles, for the tile width
// that holds the problem's heads.
#pragma once

#include <algorithm>

#include "kernels/launch.h"
#include "kernels/limits.h"

namespace sbtrain::kernels {

// One block for every `rows` queries or keys of each head.
inline dim3 attention_grid(int tokens, int rows, int heads) {
  return dim3(blocks(tokens, rows), static_cast<unsigned>(heads));
}

// The same for heads of queries that share keys and values: y counts those of a group, or of a part
// of one, z the groups.
inline dim3 query_grid(int tokens, int rows, int heads, int group) {
  return dim3(blocks(tokens, rows), static_cast<unsigned>(std::min(heads, group)),
              static_cast<unsigned>(std::max(1, heads / group)));
}

template <typename... Parameters, typename... Arguments>
void launch_attention(const char* name, cudaStream_t stream, void (*kernel)(Parameters...),
                      dim3 grid, int threads, int shared_bytes, const Arguments&... arguments) {
  check_cuda(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        shared_bytes));
  kernel<<<grid, threads, static_cast<size_t>(shared_bytes), stream>>>(arguments...);
  check_launch(name);
}

// Calls body(Int<kD>) with the width of the tiles that hold heads of head_dim channels.
template <typename Body>
void with_head_dim(const char* name, int head_dim, Body&& body) {
  if (head_dim <= 0 || head_dim > kMaxAttentionHeadDim || head_dim % 8 != 0) {
    throw_invalid_argument("%s: heads of %d channels, not a multiple of 8 up to %d", name, head_dim,
                           static_cast<int>(kMaxAttentionHeadDim));
  }
  if (head_dim <= 32) return body(Int<32>{});
  if (head_dim <= 64) return body(Int<64>{});
  if (head_dim <= 128) return body(Int<128>{});
  body(Int<kMaxAttentionHeadDim>{});
}

}  // namespace sbtrain::kernels
