#include "kernels/attention/launch_fire.cuh"
#include "kernels/attention/launch_softmax.cuh"

namespace sbtrain::kernels {
namespace {

static_assert(SoftmaxKeyShape<32>::kKeys == fire_block_keys(32) &&
              SoftmaxKeyShape<64>::kKeys == fire_block_keys(64) &&
              SoftmaxKeyShape<128>::kKeys == fire_block_keys(128) &&
              SoftmaxKeyShape<256>::kKeys == fire_block_keys(256));

}  // namespace

void softmax_forward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                     const FireParameters& x) {
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, false);
  const FireScore score = prepare_fire("fire_forward", stream, p, x, s, false, scratch);
  launch_softmax_forward("fire_forward", stream, p, score);
}

void softmax_backward(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                      const FireParameters& x, const FireGradients& dx) {
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, true);
  const FireScore score = prepare_fire("fire_backward", stream, p, x, s, true, scratch);
  auto* const data = static_cast<char*>(scratch);
  launch_softmax_backward("fire_backward", stream, p, score,
                          reinterpret_cast<float*>(data + s.delta));
  finish_fire("fire_backward", stream, p, x, dx, s, score, scratch);
}

}  // namespace sbtrain::kernels
