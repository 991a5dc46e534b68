// What the launches of softmax attention with FIRE share: the tables before the main loops, and the
// gradients of the parameters after them.
#pragma once

#include "kernels/attention/fire_parameters.cuh"
#include "kernels/launch.h"

namespace sbtrain::kernels {

static_assert(sizeof(FireDistance) == sizeof(float2));

// Forms the tables in the scratch.
inline FireScore prepare_fire(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                              const FireParameters& x, const FireScratch& s, bool backward,
                              void* scratch) {
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

// Adds the gradients of the parameters, from the sums that the main loops left.
inline void finish_fire(const char* name, cudaStream_t stream, const SoftmaxProblem& p,
                        const FireParameters& x, const FireGradients& dx, const FireScratch& s,
                        const FireScore& score, void* scratch) {
  auto* const data = static_cast<char*>(scratch);
  auto* const units = reinterpret_cast<double*>(data + s.units);
  auto* const heads = reinterpret_cast<double*>(data + s.heads);
  fire_heads_kernel<<<p.heads, dim3(kFireSums, kFireSumParts), 0, stream>>>(
      x, dx, score.partials, score.blocks, units, heads);
  check_launch(name);
  fire_parameters_kernel<<<1, kFireUnits, 0, stream>>>(x, dx, p.heads, units, heads);
  check_launch(name);
}

}  // namespace sbtrain::kernels
