#include "kernels/attention/launch_fire.cuh"
#include "kernels/attention/launch_softmax_hopper.cuh"

namespace sbtrain::kernels {
namespace {

static_assert(HopperSoftmaxKeyShape<32, FireScore>::kKeys == fire_block_keys(32) &&
              HopperSoftmaxKeyShape<64, FireScore>::kKeys == fire_block_keys(64) &&
              HopperSoftmaxKeyShape<128, FireScore>::kKeys == fire_block_keys(128));

}  // namespace

void softmax_forward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                            void* scheduler, const FireParameters& x) {
  constexpr const char* kName = "fire_forward";
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, false);
  const FireScore score = prepare_fire(kName, stream, p, x, s, false, scratch);
  launch_softmax_forward_hopper(kName, stream, p, score, scheduler);
}

void softmax_backward_hopper(cudaStream_t stream, const SoftmaxProblem& p, void* scratch,
                             void* scheduler, const FireParameters& x, const FireGradients& dx) {
  constexpr const char* kName = "fire_backward";
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, true);
  const FireScore score = prepare_fire(kName, stream, p, x, s, true, scratch);
  auto* const data = static_cast<char*>(scratch);
  launch_softmax_backward_hopper(kName, stream, p, score, reinterpret_cast<float*>(data + s.delta),
                                 scheduler);
  finish_fire(kName, stream, p, x, dx, s, score, scratch);
}

}  // namespace sbtrain::kernels
