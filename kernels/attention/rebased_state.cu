#include "kernels/attention/launch_rebased.cuh"
#include "kernels/attention/rebased_sums.cuh"

namespace sbtrain::kernels {
namespace {

int64_t state_elements(const RebasedLaunch& t) {
  return int64_t{t.p.heads} * rebased_rows(t.p.features, t.lower) * (t.p.values + 1);
}

void sum_chunks(cudaStream_t stream, const RebasedLaunch& t, RebasedSide side) {
  with_rebased_shape(t.p, [&](auto shape) {
    using S = decltype(shape);
    if (t.p.tokens == 0) return;
    launch_attention("rebased", stream, rebased_sum_kernel<S::kF, S::kE>,
                     attention_grid(t.p.tokens, kRebasedChunk, t.p.heads), kRebasedThreads,
                     RebasedSumShape<S::kF, S::kE>::kSharedBytes, t, side);
  });
}

}  // namespace

void form_rebased_states(cudaStream_t stream, const RebasedLaunch& t, RebasedSide side) {
  if (t.states == nullptr) return;
  sum_chunks(stream, t, side);
  const int64_t elements = state_elements(t);
  rebased_scan_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(
      t.states, elements, t.p.tokens, t.p.positions, side == RebasedSide::kQueries);
  check_launch("rebased");
}

void rebased_state(cudaStream_t stream, const Rebased& p, float* state) {
  RebasedLaunch all = rebased_launch(p);
  all.p.positions = nullptr;
  all.states = p.scratch;
  const int64_t chunks = rebased_chunks(p.tokens);
  float* to = state;
  for_each_rebased_group(all, p.group, [&](const RebasedLaunch& t) {
    sum_chunks(stream, t, RebasedSide::kKeys);
    const int64_t elements = state_elements(t);
    rebased_total_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(
        to, t.states, elements, chunks);
    check_launch("rebased_state");
    to += elements;
  });
}

}  // namespace sbtrain::kernels
