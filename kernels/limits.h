// The largest problems that the kernels take. Larger ones are refused when a configuration is
// planned (src/ops/limits.h), even on a machine without a GPU.
#pragma once

#include <cstdint>

namespace sbtrain::kernels {

// Attention over packs: heads of a multiple of 8 channels. Those of more than kSmallHeadDim
// channels need up to 163 KiB of shared memory, which not every GPU has.
inline constexpr int kMaxAttentionHeadDim = 256;
inline constexpr int kSmallHeadDim = 128;
// The fewest tokens of a pack that the kernels for Hopper take.
inline constexpr int kHopperTokens = 128;
inline constexpr int kMaxDecodeHeadDim = 256;
inline constexpr int kMaxAlibiHeads = 256;
// The widest row of RMSNorm and LayerNorm, and the largest head of head norm: a scalar path serves
// heads that cannot be read 16 bytes at a time.
inline constexpr int64_t kMaxNormWidth = 16384;
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kMaxScalarHeadDim = 256;
inline constexpr int kMaxRopeFrequencies = 128;  // half of the largest head
inline constexpr int kMaxDecaySegments = 64;     // of one launch of AdamW
inline constexpr int kMaxAdamWParts = 16;        // likewise
inline constexpr int kMaxNormParts = 16;         // arrays of one launch of squared_norms

}  // namespace sbtrain::kernels
