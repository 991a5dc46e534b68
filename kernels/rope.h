// Rotary positions.
#pragma once

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// Rotates the first `rotated` channels of each head of x [rows, heads * head_dim] bf16 in place by
// each row's position (ops/rope.h). turns[i] is frequency i divided by 2 pi, in double: the angle
// of a late position would lose its fraction in f32. Negative to rotate back. Source: rope.cu.
struct Rope {
  Matrix<bf16> x;
  const int32_t* positions;
  int64_t rows;
  int heads, head_dim, rotated;
  double turns[kMaxRopeFrequencies];
  // If set, the turns of a row are those of dynamic_ntk (ops/rope.h) for a text of lengths[row]
  // tokens: base (factor L / train_length - (factor - 1))^(d/(d-2)), d = rotated. Forward only.
  const int32_t* lengths = nullptr;
  double base = 0, factor = 0, train_length = 0;
  // Begins before the kernel in front of it has ended (dependent_launch.cuh), and reads the
  // positions then: no kernel since the last one that was launched plainly may have written them.
  bool early = false;
};
void launch(cudaStream_t stream, const Rope& p);

}  // namespace sbtrain::kernels
