#include "kernels/attention/launch_stickbreaking_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {

static_assert(kFoldedScale * kLog2e == 1.0f);

void stickbreaking_forward_hopper(cudaStream_t stream, const StickBreakingProblem& p,
                                  void* scratch) {
  if (p.gate == nullptr) {
    if (p.scale == kFoldedScale) return stickbreaking_forward_folded(stream, p, scratch);
    return launch_forward_of<Unfolded>(stream, p, scratch);
  }
  with_hopper_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    launch_forward<HopperForwardShape<d(), true>>(stream, with_scale_that_hides(p), scratch);
  });
}

void stickbreaking_backward_hopper(cudaStream_t stream, const StickBreakingProblem& problem) {
  const StickBreakingProblem p = with_scale_that_hides(problem);
  if (in_segments(p)) return stickbreaking_backward_in_segments(stream, p);
  if (p.gate) return stickbreaking_backward_gated(stream, p);
  if (p.scale == kFoldedScale) return stickbreaking_backward_folded(stream, p);
  launch_backward_of<Unfolded>(stream, p);
}

}  // namespace sbtrain::kernels
