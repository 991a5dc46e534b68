// The transforms of CoCA, see ops/coca.h.
#pragma once

#include "kernels/rope.h"

namespace sbtrain::kernels {

enum class CocaTransform : uint8_t { kQuery, kQueryBackward, kKey, kKeyBackward };

// Computes y [rows, heads * head_dim] bf16 from x and, backward, from dy; all three may be the same
// matrix. The member y names the output, positions and frequencies as for Rope. x is q (query, also
// backward), t (key) or the key itself (key, backward). Source: coca.cu.
struct Coca {
  Rope y;
  Matrix<const bf16> x, dy;  // dy: backward
  CocaTransform transform;
  bool strict;
};
void launch(cudaStream_t stream, const Coca& p);

}  // namespace sbtrain::kernels
