#include "ops/libraries.h"

#include "core/build_options.h"

namespace sbtrain::ops {

#if !SBTRAIN_HAS_CUDA

FoundLibrary find_cublas_lt() {
  return {.name = "cuBLASLt", .problem = "this build has only the CPU backend"};
}

FoundLibrary find_cudnn() {
  return {.name = "cuDNN", .problem = "this build has only the CPU backend"};
}

#endif

}  // namespace sbtrain::ops
