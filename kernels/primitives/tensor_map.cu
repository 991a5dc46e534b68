#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "kernels/primitives/tensor_map.h"

namespace sbtrain::kernels {
namespace {

// The driver's function, found at run time: the program is not linked with the driver, so that it
// starts where there is none.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled; update the driver");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

template <int kRank>
CUtensorMap encode(const TensorBox<kRank>& x) {
  static const PFN_cuTensorMapEncodeTiled_v12000 function = encode_tiled();
  std::array<cuuint64_t, kRank> shape{};
  std::array<cuuint64_t, kRank - 1> strides{};  // bytes
  std::array<cuuint32_t, kRank> box{}, steps{};
  for (size_t i = 0; i < kRank; ++i) {
    shape[i] = static_cast<cuuint64_t>(x.shape[i]);
    box[i] = static_cast<cuuint32_t>(x.box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(x.strides[i - 1]) * sizeof(__nv_bfloat16);
  }
  CUtensorMap map;
  const CUresult result = function(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<__nv_bfloat16*>(x.data),
      shape.data(), strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      x.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace

CUtensorMap tensor_map(const TensorBox<3>& x) {
  return encode(x);
}
CUtensorMap tensor_map(const TensorBox<5>& x) {
  return encode(x);
}

}  // namespace sbtrain::kernels
