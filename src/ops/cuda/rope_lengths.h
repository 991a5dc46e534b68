// Rows of rotary positions that belong to texts of different lengths, as kernels take them.
#pragma once

#include "kernels/rope.h"
#include "ops/cuda/arguments.h"
#include "ops/rope.h"

namespace sbtrain::ops::cuda {

inline void set_rope_lengths(kernels::Rope& p, const DynamicNtk& dynamic, const Tensor& lengths_T) {
  p.lengths = arg(lengths_T);
  p.base = dynamic.base;
  p.factor = dynamic.factor;
  p.train_length = static_cast<double>(dynamic.train_length);
}

}  // namespace sbtrain::ops::cuda
