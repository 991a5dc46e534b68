// Descriptions of tensors in the device's memory for the copy engine (tma.cuh), made on the host.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <array>
#include <cstdint>

namespace sbtrain::kernels {

// A bf16 tensor of kRank dimensions, innermost first, and the box of it that one copy brings. Rows
// of a box are innermost dimensions: 64 or 128 bytes, whose chunks of 16 bytes are permuted
// (swizzled) in shared memory as wgmma.cuh expects it.
template <int kRank>
struct TensorBox {
  const __nv_bfloat16* data = nullptr;       // aligned to 16 bytes
  std::array<int64_t, kRank> shape{};        // elements
  std::array<int64_t, kRank - 1> strides{};  // elements, of all dimensions but the innermost
  std::array<int, kRank> box{};              // elements
};

// Throws std::runtime_error if the driver refuses the description.
CUtensorMap tensor_map(const TensorBox<3>& x);
CUtensorMap tensor_map(const TensorBox<5>& x);

}  // namespace sbtrain::kernels
