// The CUDA backend: launchers of kernels/ and of the libraries. Callers use ops.h.
#pragma once

#include "ops/coca.h"
#include "ops/gpt.h"
#include "ops/ops.h"
#include "ops/rebased.h"
#include "ops/short_conv.h"
#include "ops/softmax_bias.h"

namespace sbtrain::ops::cuda {

#include "ops/implementations.inc"

// Choices made by timing, see gemm_tuner.h.
void add_choices(Stream& s, const std::string& known);
std::string keep_choices(Stream& s);

}  // namespace sbtrain::ops::cuda
