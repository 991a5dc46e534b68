// Copies between the device and page-locked memory of the host (core/pinned_memory.h), as work of a
// stream, in parts that do not cross the memory's pieces. In a plan they do nothing.
#pragma once

#include <cstddef>

#include "core/pinned_memory.h"
#include "core/stream.h"
#include "core/tensor.h"

namespace sbtrain::ops {

// From x, which is contiguous, to `offset` bytes behind the memory's start, and back. The offset is
// a multiple of the size of x's elements.
void copy_to_pinned(Stream& s, const PinnedMemory& memory, size_t offset, const Tensor& x);
void copy_from_pinned(Stream& s, const Tensor& x, const PinnedMemory& memory, size_t offset);

}  // namespace sbtrain::ops
