#include "kernels/attention/launch_rebased.cuh"
#include "kernels/attention/mainloop_rebased_backward.cuh"

namespace sbtrain::kernels {
namespace {

void write_delta(cudaStream_t stream, const RebasedLaunch& t, float* delta) {
  const unsigned grid = blocks(int64_t{t.p.tokens} * t.p.heads, kRebasedThreads);
  switch (t.e_width) {
    case 8:
      rebased_delta_kernel<8><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
      break;
    case 4:
      rebased_delta_kernel<4><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
      break;
    default:
      rebased_delta_kernel<1><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
  }
  check_launch("rebased_backward");
}

}  // namespace

void rebased_backward(cudaStream_t stream, const Rebased& p) {
  with_rebased_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    RebasedLaunch all = rebased_launch(p);
    float* delta = p.scratch;
    if (p.chunked) {
      all.states = p.scratch;
      delta +=
          rebased_chunks(p.tokens) * p.group * rebased_rows(p.features, all.lower) * (p.values + 1);
    }
    all.delta = delta;
    write_delta(stream, all, delta);
    for_each_rebased_group(all, p.chunked ? p.group : p.heads, [&](const RebasedLaunch& t) {
      form_rebased_states(stream, t, RebasedSide::kKeys);
      launch_rebased<S>("rebased_backward", stream, rebased_query_gradient_kernel<S>, t);
      form_rebased_states(stream, t, RebasedSide::kQueries);
      launch_rebased<S>("rebased_backward", stream, rebased_key_gradient_kernel<S>, t);
    });
  });
}

}  // namespace sbtrain::kernels
