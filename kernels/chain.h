// Products of few rows, rotations and attention to a cache, each of which takes what the one before
// gives, computed by one kernel: the layers of a decode step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <variant>

#include "kernels/decode.h"
#include "kernels/few_rows.h"
#include "kernels/rope.h"

namespace sbtrain::kernels {

using ChainLink = std::variant<FewRows, StickBreakingDecode, SoftmaxDecode, Rope>;

inline constexpr int64_t kChainRows = 8;

// Whether the current device has what the kernel takes: shared memory as of Hopper.
bool chain_runs();
// Whether a chain can have such a link: for products, up to kChainRows rows and 4096 channels,
// whose sizes and addresses fit vectors and tiles.
bool chain_takes(const ChainLink& link);

// The same as the links one after the other, with the same bits. All have the same number of rows.
// No link writes weights, or what a cache holds of earlier tokens. `count` is a zero on the device,
// and zero again afterwards. Source: chain.cu.
void chain(cudaStream_t stream, std::span<const ChainLink> links, int32_t* count);

}  // namespace sbtrain::kernels
