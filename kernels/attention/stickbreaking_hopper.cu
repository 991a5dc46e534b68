#include "kernels/attention/launch_attention.h"
#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"
#include "kernels/attention/stickbreaking_hopper.h"

namespace sbtrain::kernels {
namespace {

template <typename Shape, bool kGated>
void forward(cudaStream_t stream, const StickBreakingProblem& p, void* scratch) {
  constexpr int kKeys = Shape::kKeys, kD = Shape::kD;
  const int tiles = static_cast<int>(ceil_div(p.tokens, Shape::kQueries));
  const HopperForwardArguments x{.p = p,
                                 .queue = tile_queue(p, tiles, scratch),
                                 .q = token_tiles(p, p.q, Shape::kQueries),
                                 .k = key_tiles(p, p.k, kKeys),
                                 .v = key_tiles(p, p.v, kKeys)};
  fill_tile_queue_kernel<<<1, kQueueThreads, 0, stream>>>(x.queue,
                                                          QuerySteps{p, Shape::kQueries, kKeys});
  check_launch("stickbreaking_forward");
  launch_attention("stickbreaking_forward", stream, stick_forward_hopper_kernel<Shape, kGated>,
                   persistent_grid(x.queue), Shape::kThreads,
                   kSharedBytes<HopperForwardShared<Shape, kGated>>, x);
}

}  // namespace

void stickbreaking_forward_hopper(cudaStream_t stream, const StickBreakingProblem& p,
                                  void* scratch) {
  with_hopper_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    using Shape = HopperForward<d()>;
    p.gate ? forward<Shape, true>(stream, p, scratch) : forward<Shape, false>(stream, p, scratch);
  });
}

}  // namespace sbtrain::kernels
