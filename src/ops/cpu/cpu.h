// The CPU backend. Callers use ops.h.
#pragma once

#include "ops/coca.h"
#include "ops/gpt.h"
#include "ops/ops.h"
#include "ops/rebased.h"
#include "ops/short_conv.h"
#include "ops/softmax_bias.h"

namespace sbtrain::ops::cpu {

#include "ops/implementations.inc"

}  // namespace sbtrain::ops::cpu
