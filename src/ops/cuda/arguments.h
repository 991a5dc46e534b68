// Tensors as kernels take them.
#pragma once

#include <cuda_bf16.h>

#include "core/error.h"
#include "core/tensor.h"
#include "kernels/types.h"

namespace sbtrain::ops::cuda {

// Throws where the tensor is not bf16.
inline __nv_bfloat16* bf16(const Tensor& t) {
  return reinterpret_cast<__nv_bfloat16*>(t.bf16());
}
inline __nv_bfloat16* bf16_or_null(const Tensor& t) {
  return t.defined() ? bf16(t) : nullptr;
}

inline kernels::Type kernel_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kernels::Type::kF32;
    case DType::kBF16:
      return kernels::Type::kBF16;
    case DType::kI32:
      return kernels::Type::kI32;
    case DType::kF64:
      return kernels::Type::kF64;
    case DType::kI64:
    case DType::kU8:
      break;
  }
  fail(ExitCode::kInternal, "kernels do not know {}", dtype_name(dtype));
}

}  // namespace sbtrain::ops::cuda
