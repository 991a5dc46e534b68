// Whether planned memory is there, asked before it is allocated. On a host an allocation that is
// too large succeeds, and the kernel kills the process, or one beside it, when the memory is used.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "core/backend.h"
#include "core/memory.h"

namespace sbtrain {

// Persistent buffers and those of the largest program at its peak, which are in the pool.
std::array<size_t, kMemoryClasses> bytes_by_class(const MemoryReport& report);

// "activations  1.25 GiB" lines, largest first, with a line for the libraries unless they take
// none.
std::string describe_memory(const MemoryReport& report, size_t libraries = 0);

// The same in one line: "3.50 GiB (activations 2.25 GiB, weights 1.25 GiB)".
std::string summarize_memory(const MemoryReport& report, size_t libraries = 0);

// Throws ExitCode::kOutOfMemory, with the plan, if the device has less free than `plan` needs.
// `what` begins the message, such as "the run"; `advice` ends it.
void require_memory(Backend backend, const MemoryReport& plan, std::string_view what,
                    std::string_view advice);

// Throws ExitCode::kOutOfMemory for a tensor so large that no device holds it and that sums of such
// sizes might overflow. Sizes are products of numbers that users choose.
void require_possible(std::string_view name, DType dtype, std::span<const int64_t> shape);

}  // namespace sbtrain
