// Tensors as kernels take them.
#pragma once

#include "core/tensor.h"

namespace sbtrain::ops::cuda {

inline const Tensor& arg(const Tensor& t) {
  return t;
}
inline kernels::Type kernel_type(DType dtype) {
  return dtype;
}

}  // namespace sbtrain::ops::cuda
