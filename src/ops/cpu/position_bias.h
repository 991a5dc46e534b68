// The bias that one head adds to its logits by the distance of query and key (ops/attention.h).
// Logits come in rows of kTile lanes; distances grow or shrink by one from lane to lane.
#pragma once

#include <array>

#include "ops/cpu/attention_tile.h"

namespace sbtrain::ops::cpu {

// FIRE's denominators for the queries of the lanes: r = 1 / (M + eps), with
// M = psi(max(j, |m L0|)), and r times the derivatives of M.
struct FireQueries {
  alignas(64) std::array<float, kTile> r;
  alignas(64) std::array<float, kTile> by_c;
  alignas(64) std::array<float, kTile> by_m;
};

// Sums over all pairs of one head. A hidden unit is linear in u where it is active, so that the
// sums of dz and dz u over those pairs give the gradients of its weights.
struct FireSums {
  std::array<double, kFireHidden> dz{};
  std::array<double, kFireHidden> dz_u{};
  double all_dz = 0, c = 0, m = 0;
};

class HeadBias {
 public:
  HeadBias() = default;  // adds nothing
  HeadBias(const SoftmaxBias& bias, int heads, int64_t head);

  // Sets `queries` for positions first, first + step, ...
  void set_queries(FireQueries& queries, int64_t first, int64_t step) const;
  // z [kTile] += bias of keys that lie distance, distance + step, ... tokens before their queries.
  void add(float* z, const FireQueries& queries, int64_t distance, int64_t step) const;
  // Adds the bias to a tile's logits z [keys, kTile], which are of the keys from `begin` on.
  void add_tile(float* z, const FireQueries& queries, const QueryTile& tile, int64_t begin,
                int64_t keys) const;
  // sums += what FIRE's gradients need of dz, laid out as add_tile's z; masked pairs have dz = 0.
  void sum_tile(FireSums& sums, const float* dz, const FireQueries& queries, const QueryTile& tile,
                int64_t begin, int64_t keys) const;

 private:
  void sum_row(FireSums& sums, const float* dz, const FireQueries& queries, int64_t distance) const;

  PositionBias kind_ = PositionBias::kNone;
  float slope_ = 0;
  float c_ = 0, m_ = 0, b2_ = 0, length_ = 0;
  std::array<float, kFireHidden> w1_{}, b1_{}, w2_{};
};

// dfire += the gradients that follow from the sums of all heads, added in the order of the heads.
void add_fire_gradients(const FireTensors& dfire, const FireTensors& fire,
                        const std::vector<FireSums>& heads);

}  // namespace sbtrain::ops::cpu
