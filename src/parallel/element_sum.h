// Sums of elements on the host, for communicators between CPU ranks.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace sbtrain {

// y[i] += x[i] for i < n, in the type itself: a sum of bf16 is rounded to the nearest bf16, ties to
// even, and integers wrap around. `dtype` is one that Communicator sums. The ranges do not overlap.
void add_elements(DType dtype, void* y, const void* x, int64_t n);

}  // namespace sbtrain
