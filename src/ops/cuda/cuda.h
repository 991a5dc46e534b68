// The CUDA backend: launchers of kernels/ and of the libraries. Callers use ops.h.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops::cuda {

#include "ops/implementations.inc"

}  // namespace sbtrain::ops::cuda
