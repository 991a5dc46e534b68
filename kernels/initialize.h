// Initial values of parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/philox.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// x [count] = storage elements [begin, begin + count) of a parameter of `rows` rows, of whose
// `stored_cols` elements the first `cols` are logical: `value`, or with `normal` the normal number
// of the logical element times `value`. Padding becomes zero. Source: initialize.cu.
struct Initialize {
  void* x;
  Type type;  // f32, bf16
  int64_t begin, count;
  int64_t rows, cols, stored_cols;
  bool normal;
  double value;
  PhiloxStream random;
};
void initialize(cudaStream_t stream, const Initialize& p);

}  // namespace sbtrain::kernels
