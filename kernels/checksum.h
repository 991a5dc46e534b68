// Comparing matrices in the device's memory. Source: checksum.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// Adds to *sum a number of all bits of a matrix of `rows` x `cols` and of their places, modulo
// 2^64, so that in any order of addition it is the same. f32 or bf16.
struct Checksum {
  uint64_t* sum;
  Matrix<const void> x;
  Type type;
  int64_t rows, cols;
};
void launch(cudaStream_t stream, const Checksum& p);

}  // namespace sbtrain::kernels
