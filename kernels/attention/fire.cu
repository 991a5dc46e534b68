#include <algorithm>

#include "kernels/attention/fire_parameters.cuh"
#include "kernels/attention/launch_softmax.cuh"
#include "kernels/attention/softmax_bias.h"

namespace sbtrain::kernels {
namespace {

static_assert(SoftmaxKeyShape<32>::kKeys == fire_block_keys(32) &&
              SoftmaxKeyShape<64>::kKeys == fire_block_keys(64) &&
              SoftmaxKeyShape<128>::kKeys == fire_block_keys(128) &&
              SoftmaxKeyShape<256>::kKeys == fire_block_keys(256));
static_assert(sizeof(FireDistance) == sizeof(float2));

// Forms the tables in the scratch.
FireScore prepare(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                  const FireParameters& x, const FireScratch& s, bool backward, void* scratch) {
  auto* const data = static_cast<char*>(scratch);
  const FireTables tables{
      .distances = reinterpret_cast<FireDistance*>(data + s.distances),
      .r_T = reinterpret_cast<float*>(data + s.r),
      .queries_T = backward ? reinterpret_cast<FireQuery*>(data + s.queries) : nullptr,
      .breaks_K = reinterpret_cast<float*>(data + s.breaks),
      .lines_HS = reinterpret_cast<float2*>(data + s.lines),
      .bends_HK = reinterpret_cast<float*>(data + s.bends)};
  constexpr int kPositions = 128;
  const int64_t work = std::max(p.max_seqlen, p.tokens) + 2 * kFireMargin;
  fire_positions_kernel<<<blocks(work, kPositions), kPositions, 0, stream>>>(p, x, tables);
  check_launch(name);
  fire_network_kernel<<<p.heads, 2 * kFireUnits, 0, stream>>>(x, tables);
  check_launch(name);
  return {p.scale * kLog2e, tables, reinterpret_cast<float*>(data + s.partials),
          static_cast<int>(ceil_div(p.tokens, fire_block_keys(p.head_dim)))};
}

}  // namespace

void fire_forward(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                  void* scratch) {
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, false);
  const FireScore score = prepare("fire_forward", stream, p, x, s, false, scratch);
  launch_softmax_forward("fire_forward", stream, p, score);
}

void fire_backward(cudaStream_t stream, const SoftmaxProblem& p, const FireParameters& x,
                   const FireGradients& dx, void* scratch) {
  if (p.tokens == 0) return;
  const FireScratch s = fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, true);
  const FireScore score = prepare("fire_backward", stream, p, x, s, true, scratch);
  auto* const data = static_cast<char*>(scratch);
  launch_softmax_backward("fire_backward", stream, p, score,
                          reinterpret_cast<float*>(data + s.delta));
  auto* const units = reinterpret_cast<double*>(data + s.units);
  auto* const heads = reinterpret_cast<double*>(data + s.heads);
  fire_heads_kernel<<<p.heads, dim3(kFireSums, kSumParts), 0, stream>>>(x, dx, score.partials,
                                                                        score.blocks, units, heads);
  check_launch("fire_backward");
  fire_parameters_kernel<<<1, kFireUnits, 0, stream>>>(x, dx, p.heads, units, heads);
  check_launch("fire_backward");
}

}  // namespace sbtrain::kernels
