// The transforms of CoCA, see ops/coca.h.
#pragma once

#include "kernels/rope.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

enum class CocaTransform : uint8_t { kQuery, kQueryBackward, kKey, kKeyBackward };

// Computes y [rows, heads * head_dim] bf16 from x and, backward, from dy; all three may be the same
// matrix. The member y names the output, positions and frequencies as for rope(). x is q (query,
// also backward), t (key) or the key itself (key, backward). Source: coca.cu.
struct Coca {
  Rope y;
  Matrix<const __nv_bfloat16> x;
  Matrix<const __nv_bfloat16> dy;  // backward
};
void coca(cudaStream_t stream, CocaTransform transform, bool strict, const Coca& p);

}  // namespace sbtrain::kernels
