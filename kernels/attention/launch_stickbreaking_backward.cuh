// Launches the passes of stick-breaking attention, with or without a forget gate.
#pragma once

#include "kernels/attention/far_queries.h"
#include "kernels/attention/launch_attention.h"
#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {

// Those of a problem with gates.
void stickbreaking_gated_backward(cudaStream_t stream, const StickBreakingProblem& p);
void stickbreaking_gated_far_forward(cudaStream_t stream, const StickBreakingProblem& p);
void stickbreaking_gated_far_backward(cudaStream_t stream, const StickBreakingProblem& p);

template <int kD, bool kGated, int kStages, bool kFar>
void launch_stick_key_gradient(cudaStream_t stream, const StickBreakingProblem& p, int first_head,
                               int heads) {
  const int keys = kFar ? p.tokens - p.far.key / kStickKeys * kStickKeys : p.tokens;
  dim3 grid = attention_grid(keys, kStickKeys, std::max(1, heads / p.group));
  grid.z = kColumnParts<kD>;
  const auto launch = [&](auto kernel) {
    launch_attention("stickbreaking_backward", stream, kernel, grid, StickThreads::kThreads,
                     KeyGradientTiles<kD, kGated, kStages>::kBytes, p, first_head, heads,
                     first_head / p.group);
  };
  p.group > 1 ? launch(stick_key_gradient_kernel<kD, kGated, kStages, true, kFar>)
              : launch(stick_key_gradient_kernel<kD, kGated, kStages, false, kFar>);
}

// With two stages of queries, which fit every GPU for heads of up to 64 channels and those with
// more than 99 KiB of shared memory for 128. Wider heads have one stage.
template <int kD, bool kGated, bool kFar = false>
void launch_stick_key_gradient(cudaStream_t stream, const StickBreakingProblem& p, int first_head,
                               int heads) {
  if constexpr (kD <= 64) {
    launch_stick_key_gradient<kD, kGated, 2, kFar>(stream, p, first_head, heads);
  } else {
    if constexpr (kD <= 128) {
      if (KeyGradientTiles<kD, kGated, 2>::kBytes <= most_shared_bytes()) {
        return launch_stick_key_gradient<kD, kGated, 2, kFar>(stream, p, first_head, heads);
      }
    }
    launch_stick_key_gradient<kD, kGated, 1, kFar>(stream, p, first_head, heads);
  }
}

// Those of wide heads take the longest to compile, and stand in files of their own,
// stickbreaking_*key_gradient.cu.
extern template void launch_stick_key_gradient<128, false>(cudaStream_t,
                                                           const StickBreakingProblem&, int, int);
extern template void launch_stick_key_gradient<256, false>(cudaStream_t,
                                                           const StickBreakingProblem&, int, int);
extern template void launch_stick_key_gradient<128, true>(cudaStream_t, const StickBreakingProblem&,
                                                          int, int);
extern template void launch_stick_key_gradient<256, true>(cudaStream_t, const StickBreakingProblem&,
                                                          int, int);
extern template void launch_stick_key_gradient<128, false, true>(cudaStream_t,
                                                                 const StickBreakingProblem&, int,
                                                                 int);
extern template void launch_stick_key_gradient<256, false, true>(cudaStream_t,
                                                                 const StickBreakingProblem&, int,
                                                                 int);
extern template void launch_stick_key_gradient<128, true, true>(cudaStream_t,
                                                                const StickBreakingProblem&, int,
                                                                int);
extern template void launch_stick_key_gradient<256, true, true>(cudaStream_t,
                                                                const StickBreakingProblem&, int,
                                                                int);

template <bool kGated>
void launch_stickbreaking_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_backward", p.head_dim, [&](auto d) {
    constexpr int kD = d();
    using Shape = StickShape<kD, StickPass::kQuery>;
    if (p.tokens == 0) return;
    for (int head = 0, heads; head < p.heads; head += heads) {
      heads = stick_heads_at_a_time(p, head);
      launch_attention("stickbreaking_backward", stream, stick_query_gradient_kernel<kD, kGated>,
                       query_grid(p.tokens, Shape::kQueries, heads, p.group),
                       StickThreads::kThreads, stick_query_shared_bytes<kD>(), p, head,
                       head / p.group);
      launch_stick_key_gradient<kD, kGated>(stream, p, head, heads);
    }
  });
}

template <bool kGated>
void launch_stickbreaking_far_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_far_forward", p.head_dim, [&](auto d) {
    constexpr int kD = d();
    using Shape = StickShape<kD, StickPass::kForward>;
    if (p.far.queries == 0 || p.far.key == p.tokens) return;
    launch_attention("stickbreaking_far_forward", stream, stick_forward_kernel<kD, kGated, true>,
                     query_grid(p.far.queries, Shape::kQueries, p.heads, p.group),
                     StickThreads::kThreads, stick_forward_shared_bytes<kD>(), p);
  });
}

// Of the queries p.far.first_query to p.far.queries and `heads` heads from `head` on.
template <int kD, bool kGated>
void launch_stick_far_backward(cudaStream_t stream, const StickBreakingProblem& p, int head,
                               int heads) {
  using Shape = StickShape<kD, StickPass::kQuery>;
  launch_attention("stickbreaking_far_backward", stream,
                   stick_query_gradient_kernel<kD, kGated, true>,
                   query_grid(p.far.queries - p.far.first_query, Shape::kQueries, heads, p.group),
                   StickThreads::kThreads, stick_query_shared_bytes<kD>(), p, head, head / p.group);
  launch_stick_key_gradient<kD, kGated, true>(stream, p, head, heads);
}

template <bool kGated>
void launch_stickbreaking_far_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_far_backward", p.head_dim, [&](auto d) {
    for_each_part_of_far_queries(p, [&](const StickBreakingProblem& part, int head, int heads) {
      launch_stick_far_backward<d(), kGated>(stream, part, head, heads);
    });
  });
}

}  // namespace sbtrain::kernels
