// The score of ALiBi (arXiv 2108.12409): the scaled product less slope * distance.
#pragma once

#include "kernels/attention/fire.h"
#include "kernels/attention/position_bias.h"
#include "kernels/attention/score_scaled.cuh"
#include "kernels/primitives/accumulator.cuh"

namespace sbtrain::kernels {

struct AlibiScore {
  static constexpr bool kOfHead = true;
  static constexpr bool kExactDelta = false;
  float scale_log2;
  AlibiSlopes slopes_log2;

  // kSign is 1 where rows are queries, -1 where they are keys, see for_each_by_distance.
  template <int kSign, typename Base>
  struct Rows : Base {
    __device__ __forceinline__ Rows(const AlibiScore& policy, const TileCoordinates& at)
        : scale(policy.scale_log2),
          slope(policy.slopes_log2.of_head[at.head]),
          first(at.first + at.warp_row + lane_row() - lane_col()) {}
    __device__ __forceinline__ void enter(const void*, int begin) {
      distance = kSign > 0 ? first - begin : begin - first;
    }
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      const float at_first = -slope * static_cast<float>(distance);
      for_each_by_distance<kSign, Tile::kRows, Tile::kCols / 2>(
          s, [&](int offset) { return fmaf(-slope, static_cast<float>(offset), at_first); },
          [&](float& x, float bias, int, int, int) { x = fmaf(x, scale, bias); });
    }
    float scale, slope;
    int first, distance = 0;  // between the lane's first row and column
  };
  template <typename Shape>
  using QueryRows = Rows<1, NothingStaged>;
  template <typename Shape>
  using KeyRows = Rows<-1, NoGradient>;
};

}  // namespace sbtrain::kernels
