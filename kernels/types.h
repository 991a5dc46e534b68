// Element types as kernels see them.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

enum class Type : uint8_t { kF32, kBF16, kI32, kF64 };

}  // namespace sbtrain::kernels
