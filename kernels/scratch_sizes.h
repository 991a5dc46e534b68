// The parts of sums over tokens, which the memory plan needs even on a machine without a GPU.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// Sums over tokens are formed in this many parts, always the same ones, and then added in a fixed
// order. There are two for each of the 132 multiprocessors of an H100 or H200; other GPUs use the
// same number, and so give the same sums. The scratch of a kernel that forms such sums is f32
// [kTokenParts, n]; its header states n.
inline constexpr int64_t kTokenParts = 264;

}  // namespace sbtrain::kernels
