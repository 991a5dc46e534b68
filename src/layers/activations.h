// The memory of a pass's intermediate results.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/memory.h"
#include "core/stream.h"

namespace sbtrain {

// A matrix of activations in the compute type, of rows by cols elements.
inline Buffer activation(Stream& s, std::string_view name, int64_t rows, int64_t cols) {
  return s.memory().allocate(MemoryClass::kActivations, name, s.memory().compute_dtype(),
                             {rows, cols});
}

}  // namespace sbtrain
