// How the work of kernels is divided, and the scratch that this takes: plain arithmetic, so that
// memory can be planned without CUDA.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace sbtrain::kernels {

constexpr size_t align_scratch(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Sums over tokens are formed in this many parts, always the same ones, and then added in a fixed
// order. There are two for each of the 132 multiprocessors of an H100 or H200; other GPUs use the
// same number, and so give the same sums. The scratch of a kernel that forms such sums is f32
// [kTokenParts, n]; its header states n.
inline constexpr int64_t kTokenParts = 264;

// Products of up to this many rows have a kernel of their own (kernels/skinny_gemm.h).
inline constexpr int64_t kSkinnyRows = 64;

// The keys that a token sees are split into parts that different blocks can take. Where the parts
// end depends on the number of keys alone, so a sequence has the same bits whatever else is in the
// batch.
inline constexpr int64_t kDecodePartKeys = 512;
inline constexpr int64_t kMaxDecodeParts = 64;
template <std::integral T>
constexpr T decode_parts(T keys) {
  const T parts = (keys - 1) / T{kDecodePartKeys} + 1;
  return parts < 1 ? T{1} : parts > T{kMaxDecodeParts} ? T{kMaxDecodeParts} : parts;
}
// Of scratch, f32: for each head of each sequence what each part gives, if there can be several.
constexpr int64_t decode_scratch_floats(int64_t batch, int64_t heads, int64_t head_dim,
                                        int64_t capacity) {
  const int64_t parts = decode_parts(capacity);
  return parts == 1 ? 0 : batch * heads * parts * (head_dim + 2);
}
// Several blocks share a head only while that gives fewer blocks than this. What a plan is made for
// does not matter: neither scratch nor bits depend on it.
constexpr int64_t decode_blocks(int multiprocessors) {
  return int64_t{4} * multiprocessors;
}

}  // namespace sbtrain::kernels
