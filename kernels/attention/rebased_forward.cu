#include "kernels/attention/launch_rebased.cuh"
#include "kernels/attention/mainloop_rebased_forward.cuh"

namespace sbtrain::kernels {

void rebased_forward(cudaStream_t stream, const Rebased& p) {
  with_rebased_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    RebasedLaunch all = rebased_launch(p);
    if (p.chunked) all.states = p.scratch;
    for_each_rebased_group(all, p.chunked ? p.group : p.heads, [&](const RebasedLaunch& t) {
      form_rebased_states(stream, t, RebasedSide::kKeys);
      launch_rebased<S>("rebased_forward", stream, rebased_forward_kernel<S>, t);
    });
  });
}

}  // namespace sbtrain::kernels
