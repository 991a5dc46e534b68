#include "ops/cuda/cublas_lt.h"

#include "core/shared_library.h"

namespace sbtrain::ops::cuda {
namespace {

CublasLt load() {
  const SharedLibrary library("cuBLASLt", {SBTRAIN_CUBLAS_LT_NAME, SBTRAIN_CUBLAS_LT_LIBRARY},
                              "install the CUDA toolkit, or set device: cpu");
  CublasLt functions;
#define SBTRAIN_FIND(name) library.find(functions.name, "cublasLt" #name);
  SBTRAIN_CUBLAS_LT_FUNCTIONS(SBTRAIN_FIND)
#undef SBTRAIN_FIND
  return functions;
}

}  // namespace

const CublasLt& cublas_lt() {
  static const CublasLt kFunctions = load();
  return kFunctions;
}

}  // namespace sbtrain::ops::cuda
