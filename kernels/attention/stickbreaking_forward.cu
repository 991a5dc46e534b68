#include "kernels/attention/launch_attention.h"
#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/stickbreaking.h"

namespace sbtrain::kernels {
namespace {

template <int kD, bool kGated>
void forward(cudaStream_t stream, const StickBreakingProblem& p) {
  using Shape = StickShape<kD, StickPass::kForward>;
  launch_attention("stickbreaking_forward", stream, stick_forward_kernel<kD, kGated>,
                   query_grid(p.tokens, Shape::kQueries, p.heads, p.group), StickThreads::kThreads,
                   stick_forward_shared_bytes<kD>(), p);
}

}  // namespace

void stickbreaking_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    p.gate ? forward<d(), true>(stream, p) : forward<d(), false>(stream, p);
  });
}

}  // namespace sbtrain::kernels
