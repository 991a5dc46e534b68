#include "kernels/attention/far_queries.h"
#include "kernels/attention/launch_stickbreaking_backward.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward.cuh"

namespace sbtrain::kernels {

void stickbreaking_far_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_far_forward", p.head_dim, [&](auto d) {
    constexpr int kD = d();
    using Shape = StickShape<kD, StickPass::kForward>;
    if (p.far.queries == 0 || p.far.key == p.tokens) return;
    launch_attention("stickbreaking_far_forward", stream, stick_forward_kernel<kD, false, true>,
                     query_grid(p.far.queries, Shape::kQueries, p.heads, p.group),
                     StickThreads::kThreads, stick_forward_shared_bytes<kD>(), p);
  });
}

void stickbreaking_far_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_far_backward", p.head_dim, [&](auto d) {
    for_each_part_of_far_queries(p, [&](const StickBreakingProblem& part, int head, int heads) {
      launch_stick_far_backward<d()>(stream, part, head, heads);
    });
  });
}

}  // namespace sbtrain::kernels
