// Launches the stick-breaking backward pass in a single pass (sm_90a).
#pragma once

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/single_pass_scratch_hopper.cuh"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {

// Writes dk and dv, and dq if the shape says so: for documents as ops/attention.h says, without
// gates and skipping, where the remainder goes to nothing and p.scale is kFoldedScale.
template <typename Shape>
void launch_single_pass(cudaStream_t stream, const StickBreakingProblem& p, void* scratch) {
  constexpr const char* kName = "stickbreaking_backward_single";
  if (p.gate != nullptr || p.skip_epsilon != 0 || p.remainder != StickRemainder::kNone ||
      p.scale != kFoldedScale) {
    throw_invalid_argument("%s: gates, skipping, remainders and scales are not computed", kName);
  }
  const SinglePassArguments x = single_pass_arguments<Shape>(p, scratch);
  const dim3 all_tiles(static_cast<unsigned>(x.tiles), static_cast<unsigned>(p.heads));
  begin_single_pass_kernel<<<all_tiles, 64, 0, stream>>>(x, Shape::kKeys);
  check_launch(kName);
  if constexpr (Shape::kQueryGradient) {
    check_cuda(kName,
               cudaMemsetAsync(
                   x.dq, 0, static_cast<size_t>(x.tile(p.heads, 0)) * 64 * Shape::kD * 4, stream));
  }
  const int blocks = std::min(x.places * p.heads, multiprocessors());
  launch_attention(kName, stream, single_pass_kernel<Shape>, dim3(static_cast<unsigned>(blocks)),
                   Shape::kThreads, kSharedBytes<SinglePassShared<Shape>>, x);
  if constexpr (Shape::kQueryGradient) {
    end_single_pass_kernel<Shape::kD><<<all_tiles, 128, 0, stream>>>(x);
    check_launch(kName);
  }
}

}  // namespace sbtrain::kernels
