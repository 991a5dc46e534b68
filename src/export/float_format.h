// The number formats in which weights are stored: f32, bf16 and f16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checkpoint/safetensors.h"

namespace sbtrain {

// Whether weights may have this type.
bool is_weight_type(FileDType type);

// Writes `count` values as `type`, rounded to the nearest, ties to even. Returns the number of
// finite values that `type` cannot hold, which become infinite.
size_t from_f32(FileDType type, const float* values, size_t count, void* out);

// Reads `count` values of `type`, which f32 holds exactly.
void to_f32(FileDType type, const void* values, size_t count, float* out);

}  // namespace sbtrain
