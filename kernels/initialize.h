// Initial values of parameters (ops/initialize.h).
#pragma once

#include "kernels/philox.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// x [count]: `value`, or with `normal` the normal number of the logical element times `value`;
// padding becomes zero. Source: initialize.cu.
struct Initialize {
  void* x;
  Type type;  // f32, bf16
  int64_t begin, count;
  int64_t rows, cols, stored_cols;
  bool normal;
  double value;
  PhiloxStream random;
};
void launch(cudaStream_t stream, const Initialize& p);

}  // namespace sbtrain::kernels
