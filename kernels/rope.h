// Rotary positions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// Rotates x [rows, heads * head_dim] bf16 in place by each row's position (i32), half-split:
// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 = x[:head_dim / 2], x2 = x[head_dim / 2:].
// turns[i] is frequency i divided by 2 pi, in double: the angle of a late position would lose its
// fraction in f32. Negative to rotate back. Source: rope.cu.
struct Rope {
  Matrix<__nv_bfloat16> x;
  const int32_t* positions;
  int64_t rows;
  int heads, head_dim;
  double turns[kMaxRopeFrequencies];
  // If set, the turns of a row are those of dynamic_ntk (ops/rope.h) for a text of lengths[row]
  // tokens: base (factor L / train_length - (factor - 1))^(d/(d-2)). Forward only.
  const int32_t* lengths = nullptr;
  double base = 0, factor = 0, train_length = 0;
  // Begins before the kernel in front of it has ended (dependent_launch.cuh), and reads the
  // positions then: no kernel since the last one that was launched plainly may have written them.
  bool early = false;
};
// Fills p.turns from p.head_dim / 2 frequencies, in radians for one position.
void set_rope_frequencies(Rope& p, const double* frequencies, bool inverse);
void rope(cudaStream_t stream, const Rope& p);

}  // namespace sbtrain::kernels
