// Scratch of the attention kernels in bytes: plain arithmetic, so that memory can be planned on a
// machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

// rowsum(do * o) of every query and head, f32 [H, T].
constexpr size_t softmax_backward_scratch_bytes(int64_t tokens, int64_t heads) {
  return static_cast<size_t>(tokens * heads) * sizeof(float);
}

}  // namespace sbtrain::kernels
