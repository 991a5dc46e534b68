// The libraries of the ops as they are on this machine, loaded only to be described.
#pragma once

#include "core/shared_library.h"

namespace sbtrain::ops {

FoundLibrary find_openblas();  // with the processor whose kernels it runs
// In a build without CUDA, or of cuDNN without its headers, `problem` says so.
FoundLibrary find_cublas_lt();
FoundLibrary find_cudnn();

}  // namespace sbtrain::ops
