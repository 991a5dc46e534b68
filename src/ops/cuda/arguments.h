// Tensors as kernels take them.
#pragma once

#include <cuda_bf16.h>

#include "core/error.h"
#include "core/tensor.h"
#include "kernels/types.h"

namespace sbtrain::ops::cuda {

// Converts a tensor to the pointer or matrix that a kernel's parameter is; throws if the tensor has
// another type. An undefined tensor becomes a null pointer.
class Argument {
 public:
  explicit Argument(const Tensor& t) : t_(t) {}

  template <typename T>
  operator T*() const {  // NOLINT: kernels' parameters say what they take
    if (!t_.defined()) return nullptr;
    return data(static_cast<std::remove_const_t<T>*>(nullptr));
  }
  template <typename T>
  operator kernels::Matrix<T>() const {  // NOLINT: likewise
    return {*this, t_.row_stride};
  }

 private:
  float* data(float*) const { return t_.f32(); }
  double* data(double*) const { return t_.f64(); }
  int32_t* data(int32_t*) const { return t_.i32(); }
  __nv_bfloat16* data(__nv_bfloat16*) const { return reinterpret_cast<__nv_bfloat16*>(t_.bf16()); }
  void* data(void*) const { return t_.data; }
  const Tensor& t_;
};
inline Argument arg(const Tensor& t) {
  return Argument(t);
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
  fail(ExitCode::kInternal, "the CUDA kernels have no type for {}", dtype_name(dtype));
}

}  // namespace sbtrain::ops::cuda
