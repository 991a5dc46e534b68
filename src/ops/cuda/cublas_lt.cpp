#include "ops/cuda/cublas_lt.h"

#include "core/shared_library.h"
#include "ops/libraries.h"

namespace sbtrain::ops::cuda {
namespace {

SharedLibrary open_library() {
  return {"cuBLASLt",
          {SBTRAIN_CUBLAS_LT_NAME, SBTRAIN_CUBLAS_LT_LIBRARY},
          "install it (pip install 'sbtrain[cuda]', or the CUDA toolkit), or set device: cpu"};
}

CublasLt load() {
  const SharedLibrary library = open_library();
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

namespace sbtrain::ops {

FoundLibrary find_cublas_lt() {
  return look_for("cuBLASLt", [](FoundLibrary& found) {
    found.path = cuda::open_library().path();
    found.version = dotted_version(cuda::cublas_lt().GetVersion());
  });
}

}  // namespace sbtrain::ops
