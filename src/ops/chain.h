// Steps of decoding by one kernel.
#pragma once

#include <functional>

#include "core/stream.h"

namespace sbtrain::ops {

// Calls `work`. On a GPU, while the stream is recorded (core/replay.h), one kernel computes what
// `work` gives the stream of DecodeLinear, Linear, Rope, SoftmaxDecode and StickBreakingDecode ops in a
// row, as far as it can (kernels/chain.h). That changes no result.
void run_chained(Stream& s, const std::function<void()>& work);

namespace cuda {
void run_chained(Stream& s, const std::function<void()>& work);
}  // namespace cuda

}  // namespace sbtrain::ops
