// Launches the stick-breaking backward pass in a single pass (sm_90a), for
// stickbreaking_single_pass_hopper.cu, what is folded into the queries
// (stickbreaking_single_pass_folded_hopper.cu), gates (stickbreaking_single_pass_gated_hopper.cu)
// and keys of other ranks (stickbreaking_far_single_pass_hopper.cu).
#pragma once

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/single_pass_arguments_hopper.cuh"
#include "kernels/attention/single_pass_ends_hopper.cuh"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {

template <typename Shape>
void launch_single_pass(cudaStream_t stream, const StickBreakingProblem& p) {
  constexpr const char* kName = "stickbreaking_backward";
  for (int first_head = 0; first_head < p.heads; first_head += p.workspace_heads) {
    const SinglePassArguments x = single_pass_arguments<Shape>(p, first_head);
    const dim3 tiles(static_cast<unsigned>(x.tiles), static_cast<unsigned>(x.heads));
    if constexpr (Shape::kFar) {
      check_cuda(kName, cudaMemsetAsync(x.taken, kNothingSeen, sizeof(int), stream));
    }
    begin_single_pass_kernel<Shape::kFar>
        <<<tiles, kSinglePassBeginThreads, 0, stream>>>(x, Shape::kKeys);
    check_launch(kName);
    if constexpr (Shape::kGated) {
      const dim3 key_blocks(static_cast<unsigned>(ceil_div(p.tokens, kStickKeys)),
                            static_cast<unsigned>(x.heads));
      prepare_gates_kernel<<<key_blocks, kStickKeys, 0, stream>>>(x);
      check_launch(kName);
    }
    const int blocks = std::min(x.places * x.heads, multiprocessors());
    launch_attention(kName, stream, single_pass_hopper_kernel<Shape>,
                     dim3(static_cast<unsigned>(blocks)), Shape::kThreads,
                     kSharedBytes<SinglePassShared<Shape>>, x);
    if constexpr (Shape::kFar) {
      end_far_single_pass_kernel<Shape::kD><<<tiles, kSinglePassEndThreads, 0, stream>>>(x);
    } else {
      end_single_pass_kernel<Shape::kD><<<tiles, kSinglePassEndThreads, 0, stream>>>(x);
    }
    check_launch(kName);
    if constexpr (Shape::kGated) {
      if (x.dkv == nullptr) continue;
      const dim3 key_blocks(static_cast<unsigned>(ceil_div(p.tokens, kStickKeys)),
                            static_cast<unsigned>(x.heads / p.group));
      add_groups_kernel<Shape::kD><<<key_blocks, kSinglePassEndThreads, 0, stream>>>(x);
      check_launch(kName);
    }
  }
}

// Kind is Folded, Unfolded, Gated or Far.
template <template <typename> class Kind>
void launch_single_pass_of(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.tokens == 0) return;
  if (p.head_dim == 32) return launch_single_pass<Kind<SinglePassShape<32>>>(stream, p);
  if (p.head_dim == 64) return launch_single_pass<Kind<SinglePassShape<64>>>(stream, p);
  throw_invalid_argument(
      "stickbreaking_backward: a single pass takes heads of 32 or 64 channels, "
      "not %d",
      p.head_dim);
}

// Where p.scale is kFoldedScale.
void stickbreaking_backward_single_pass_folded(cudaStream_t stream, const StickBreakingProblem& p);
// With gates.
void stickbreaking_backward_single_pass_gated(cudaStream_t stream, const StickBreakingProblem& p);

}  // namespace sbtrain::kernels
