// The CPU backend. Callers use ops.h.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops::cpu {

#include "ops/implementations.inc"

}  // namespace sbtrain::ops::cpu
