// Products of the main loops whose consumers own 64 queries of a tile and walk over blocks of keys
// (sm_90a). `shared` has the tile's queries and stages of keys and values with their pipelines,
// `row` is the consumer's first query in the tile. What is issued is under way until
// wait_for_products().
#pragma once

#include "kernels/attention/tiles_hopper.cuh"

namespace sbtrain::kernels {

// s = q k^T of the block at `keys`, once it is loaded.
template <typename Shape, typename Shared, int kKeys>
__device__ __forceinline__ void issue_scores(Shared& shared,
                                             const PipelineState<Shape::kStages>& keys, int row,
                                             WarpgroupAccumulator<kKeys>& s) {
  constexpr int kD = Shape::kD;
  shared.keys.wait(keys);
  const TileOperand<Shape::kQueries, kD, TileUse::kRows> q(shared.q + row * kPanelCols<kD>);
  const TileOperand<kKeys, kD, TileUse::kRows> k(shared.k[keys.stage()]);
  s.pin();
  wgmma_fence();
  issue_product<kD>(s, q, k);
  wgmma_commit();
}

// o += a v of the block at `values`, once it is loaded.
template <typename Shape, typename Shared, int kKeys>
__device__ __forceinline__ void issue_output(Shared& shared,
                                             const PipelineState<Shape::kStages>& values,
                                             WarpgroupAccumulator<Shape::kD>& o,
                                             WarpgroupOperand<kKeys>& a) {
  using Values = TileOperand<kKeys, Shape::kD, TileUse::kColumns>;
  shared.values.wait(values);
  a.pin();
  o.pin();
  wgmma_fence();
  issue_product<kKeys>(o, a, Values(shared.v[values.stage()]));
  wgmma_commit();
}

// s = q k^T and dp = do v^T of the block at `state`, once it is loaded.
template <typename Shape, typename Shared, int kKeys>
__device__ __forceinline__ void issue_scores(Shared& shared,
                                             const PipelineState<Shape::kStages>& state, int row,
                                             WarpgroupAccumulator<kKeys>& s,
                                             WarpgroupAccumulator<kKeys>& dp) {
  constexpr int kD = Shape::kD;
  const int offset = row * kPanelCols<kD>;
  const TileOperand<Shape::kQueries, kD, TileUse::kRows> q(shared.q + offset);
  const TileOperand<Shape::kQueries, kD, TileUse::kRows> dout(shared.dout + offset);
  const int stage = uniform(state.stage());
  const TileOperand<kKeys, kD, TileUse::kRows> k(shared.k[stage]), v(shared.v[stage]);
  shared.keys.full[stage].wait(state.parity());
  s.pin();
  dp.pin();
  wgmma_fence();
  issue_product<kD>(s, q, k);
  shared.values.full[stage].wait(state.parity());
  wgmma_fence();
  issue_product<kD>(dp, dout, v);
  wgmma_commit();
}

// dq += ds k of the block at `keys`, which has been loaded.
template <typename Shape, typename Shared, int kKeys>
__device__ __forceinline__ void issue_query_gradient(Shared& shared,
                                                     const PipelineState<Shape::kStages>& keys,
                                                     WarpgroupAccumulator<Shape::kD>& dq,
                                                     WarpgroupOperand<kKeys>& ds) {
  using Keys = TileOperand<kKeys, Shape::kD, TileUse::kColumns>;
  ds.pin();
  dq.pin();
  wgmma_fence();
  issue_product<kKeys>(dq, ds, Keys(shared.k[uniform(keys.stage())]));
  wgmma_commit();
}

}  // namespace sbtrain::kernels
