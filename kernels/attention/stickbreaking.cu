#include "kernels/attention/launch_attention.h"
#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/device_attribute.h"

namespace sbtrain::kernels {
namespace {

template <int kD, bool kGated>
void forward(cudaStream_t stream, const StickBreakingProblem& p) {
  using Shape = StickShape<kD, StickPass::kForward>;
  launch_attention("stickbreaking_forward", stream, stick_forward_kernel<kD, kGated>,
                   attention_grid(p.tokens, Shape::kQueries, p.heads), StickThreads::kThreads,
                   stick_forward_shared_bytes<kD>(), p);
}

template <int kD, bool kGated, int kStages>
void key_gradient(cudaStream_t stream, const StickBreakingProblem& p, int first_head, int heads) {
  dim3 grid = attention_grid(p.tokens, kStickKeys, heads);
  grid.z = kColumnParts<kD>;
  launch_attention("stickbreaking_backward", stream, stick_key_gradient_kernel<kD, kGated, kStages>,
                   grid, StickThreads::kThreads, KeyGradientTiles<kD, kGated, kStages>::kBytes, p,
                   first_head);
}

template <int kD, bool kGated>
void backward(cudaStream_t stream, const StickBreakingProblem& p) {
  const bool two_stages = KeyGradientTiles<kD, kGated, 2>::kBytes <= most_shared_bytes();
  for (int head = 0; head < p.heads; head += p.workspace_heads) {
    const int heads = std::min(p.heads - head, p.workspace_heads);
    using Shape = StickShape<kD, StickPass::kQuery>;
    launch_attention("stickbreaking_backward", stream, stick_query_gradient_kernel<kD, kGated>,
                     attention_grid(p.tokens, Shape::kQueries, heads), StickThreads::kThreads,
                     stick_query_shared_bytes<kD>(), p, head);
    if (two_stages) {
      key_gradient<kD, kGated, 2>(stream, p, head, heads);
    } else {
      key_gradient<kD, kGated, 1>(stream, p, head, heads);
    }
  }
}

}  // namespace

void stickbreaking_forward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_forward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    p.gate ? forward<d(), true>(stream, p) : forward<d(), false>(stream, p);
  });
}

void stickbreaking_backward(cudaStream_t stream, const StickBreakingProblem& p) {
  with_head_dim("stickbreaking_backward", p.head_dim, [&](auto d) {
    if (p.tokens == 0) return;
    p.gate ? backward<d(), true>(stream, p) : backward<d(), false>(stream, p);
  });
}

}  // namespace sbtrain::kernels
