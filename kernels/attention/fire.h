// FIRE (arXiv 2310.04418) as its kernels compute it. The network 1 -> 32 -> H with ReLU is a
// piecewise linear function of u = psi(distance) r, psi(n) = log(|c| n + 1), where r belongs to the
// query: r = 1 / (psi(max(j, |m L0|)) + eps). Its breaks, at most 32, are the same for all heads.
//
// The scores of a tile start on the line of its lowest u and bend at each break between its lowest
// and its highest u; most tiles have no such break. Likewise, gradients are sums over a tile and
// over the part of it above each break.
//
// These are plain functions of one lane, so that they can be tested without a GPU.
#pragma once

#include <math.h>

#include "kernels/attention/scratch_sizes.h"

#ifdef __CUDACC__
#define SBTRAIN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SBTRAIN_HOST_DEVICE inline
#endif
#ifdef __CUDA_ARCH__
#define SBTRAIN_UNROLL _Pragma("unroll")
#else
#define SBTRAIN_UNROLL
#endif

namespace sbtrain::kernels {

inline constexpr double kFireEpsilon = 1e-6;

// ---- The network --------------------------------------------------------------------------------

struct FireNetwork {
  float w1[kFireUnits], b1[kFireUnits];
};

// Where a unit begins or ceases to be active; +inf where it never does.
SBTRAIN_HOST_DEVICE float fire_break(float w1, float b1) {
  return w1 == 0.0f ? INFINITY : -b1 / w1;
}
// How many breaks come before the unit's.
SBTRAIN_HOST_DEVICE int fire_rank(const FireNetwork& net, int unit) {
  const float mine = fire_break(net.w1[unit], net.b1[unit]);
  int rank = 0;
  for (int k = 0; k < kFireUnits; ++k) {
    const float other = fire_break(net.w1[k], net.b1[k]);
    rank += other < mine || (other == mine && k < unit);
  }
  return rank;
}
// Whether the unit of this rank is active in the segment above `segment` breaks.
SBTRAIN_HOST_DEVICE bool fire_active(float w1, float b1, int rank, int segment) {
  if (w1 == 0.0f) return b1 > 0.0f;
  return (w1 > 0.0f) == (rank < segment);
}

struct FireLine {
  double slope, intercept;
};
// The network's output for one head in the segment above `segment` breaks; w2 is that of the head.
SBTRAIN_HOST_DEVICE FireLine fire_line(const FireNetwork& net, const float* w2, float b2,
                                       const int* ranks, int segment) {
  FireLine line = {0.0, static_cast<double>(b2)};
  for (int k = 0; k < kFireUnits; ++k) {
    if (!fire_active(net.w1[k], net.b1[k], ranks[k], segment)) continue;
    line.slope += static_cast<double>(w2[k]) * static_cast<double>(net.w1[k]);
    line.intercept += static_cast<double>(w2[k]) * static_cast<double>(net.b1[k]);
  }
  return line;
}
// By how much the slope grows at the unit's break, where it begins to rise or ceases to fall.
SBTRAIN_HOST_DEVICE float fire_bend(float w1, float w2) {
  return w2 * fabsf(w1);
}

// ---- Positions ----------------------------------------------------------------------------------

struct FireDistance {
  float psi;   // psi(n), 0 for negative n
  float rate;  // its derivative by |c|
};
SBTRAIN_HOST_DEVICE FireDistance fire_distance(float c, int64_t distance) {
  const double n = distance > 0 ? static_cast<double>(distance) : 0.0;
  const double x = fabs(static_cast<double>(c)) * n;
  return {static_cast<float>(log1p(x)), static_cast<float>(n / (x + 1.0))};
}

// The factors of a query's u: du = distance_by_c rate dc - psi (by_c dc + by_m dm).
struct alignas(16) FireQuery {
  float r;
  float distance_by_c, by_c, by_m;
};
SBTRAIN_HOST_DEVICE float fire_sign(float x) {
  return static_cast<float>((x > 0.0f) - (x < 0.0f));
}
// `length` is L0.
SBTRAIN_HOST_DEVICE FireQuery fire_query(float c, float m, float length, int position) {
  const double rate = fabs(static_cast<double>(c));
  const double reach = fabs(static_cast<double>(m)) * length;
  const double x = reach > position ? reach : position;
  const double r = 1.0 / (log1p(rate * x) + kFireEpsilon);
  const double dlog = r / (rate * x + 1.0);
  const double by_m = reach > position ? rate * length * fire_sign(m) * dlog : 0.0;
  return {static_cast<float>(r), static_cast<float>(fire_sign(c) * r),
          static_cast<float>(fire_sign(c) * r * x * dlog), static_cast<float>(r * by_m)};
}

// ---- Tiles --------------------------------------------------------------------------------------
// What a lane holds of a tile of accumulators: kRows rows 8 apart and kColBlocks pairs of columns 8
// apart (see tile_products.cuh). Its distances query - key are kSign * (8 (i - c) - odd) more than
// that of its first element; kSign is 1 where the rows are queries, -1 where they are keys.

// Calls body(element, of_distance(offset), row, column block, odd) once for each element.
template <int kSign, int kRows, int kColBlocks, typename Tile, typename OfDistance, typename Body>
SBTRAIN_HOST_DEVICE void for_each_by_distance(Tile& x, OfDistance&& of_distance, Body&& body) {
  SBTRAIN_UNROLL
  for (int e = 1 - kColBlocks; e < kRows; ++e) {
    SBTRAIN_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const auto entry = of_distance(kSign * (8 * e - odd));
      SBTRAIN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int c = i - e;
        if (c >= 0 && c < kColBlocks) body(x.at[i / 2][c][i % 2 * 2 + odd], entry, i, c, odd);
      }
    }
  }
}

// Products become scores on one line, x = scale x + slope u + intercept. r(i, c, odd) is that of
// an element's query, psi(offset) that of its distance.
template <int kSign, int kRows, int kColBlocks, typename Tile, typename OfQuery,
          typename OfDistance>
SBTRAIN_HOST_DEVICE void fire_score(Tile& x, float scale, float slope, float intercept, OfQuery&& r,
                                    OfDistance&& psi) {
  for_each_by_distance<kSign, kRows, kColBlocks>(
      x, psi, [&](float& x_ij, float psi_ij, int i, int c, int odd) {
        x_ij = fmaf(x_ij, scale, fmaf(slope * r(i, c, odd), psi_ij, intercept));
      });
}
// Above a break the line is steeper: x += bend (u - at) where u > at.
template <int kSign, int kRows, int kColBlocks, typename Tile, typename OfQuery,
          typename OfDistance>
SBTRAIN_HOST_DEVICE void fire_bend_score(Tile& x, float at, float bend, OfQuery&& r,
                                         OfDistance&& psi) {
  for_each_by_distance<kSign, kRows, kColBlocks>(
      x, psi, [&](float& x_ij, float psi_ij, int i, int c, int odd) {
        x_ij = fmaf(bend, fmaxf(fmaf(psi_ij, r(i, c, odd), -at), 0.0f), x_ij);
      });
}

// Where all queries of a tile have the same denominator, u depends only on the distance, and it is
// enough to look at one element of each of the lane's distances. These are a tile too, of
// kDiagonals rows and one pair of columns; its distances are kSign * 8 * (kColBlocks - 1) less than
// the tile's.
template <int kRows, int kColBlocks>
struct FireDiagonals {
  static constexpr int kDiagonals = kRows + kColBlocks - 1;
  float at[(kDiagonals + 1) / 2][1][4] = {};

  // Calls body(element, the element of its distance).
  template <typename Tile, typename Body>
  SBTRAIN_HOST_DEVICE void for_each(Tile& x, Body&& body) {
    const auto none = [](int) { return 0; };
    for_each_by_distance<1, kRows, kColBlocks>(x, none,
                                               [&](float& x_ij, int, int i, int c, int odd) {
                                                 const int e = i - c + kColBlocks - 1;
                                                 body(x_ij, at[e / 2][0][e % 2 * 2 + odd]);
                                               });
  }
};

// What the pairs of a tile, or those of it with u > `bound`, add to the gradients.
struct FireTileSums {
  float dz = 0.0f, dz_u = 0.0f;
  float dc = 0.0f, dm = 0.0f;  // of c and m, for a slope of 1
};
// `gradient` is dz of a tile whose rows are keys; query(c, odd) gives an element's query, and
// of_distance is as above. With kAll `bound` is ignored.
template <bool kAll, int kRows, int kColBlocks, typename Tile, typename OfQuery,
          typename OfDistance>
SBTRAIN_HOST_DEVICE FireTileSums fire_tile_sums(Tile& gradient, float bound, OfQuery&& query,
                                                OfDistance&& of_distance) {
  FireTileSums sums;
  FireDistance at[2][kRows];  // of the column's rows; the next column's are one diagonal further
  SBTRAIN_UNROLL
  for (int c = 0; c < kColBlocks; ++c) {
    SBTRAIN_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const FireQuery x = query(c, odd);
      float dz = 0.0f, dz_psi = 0.0f, dz_rate = 0.0f;
      SBTRAIN_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int e = i - c;
        FireDistance& here = at[odd][(e + kColBlocks * kRows) % kRows];
        if (c == 0 || i == 0) here = of_distance(odd - 8 * e);
        const float dz_ij = gradient.at[i / 2][c][i % 2 * 2 + odd];
        const float g = kAll || fmaf(here.psi, x.r, -bound) > 0.0f ? dz_ij : 0.0f;
        dz += g;
        dz_psi = fmaf(g, here.psi, dz_psi);
        dz_rate = fmaf(g, here.rate, dz_rate);
      }
      sums.dz += dz;
      sums.dz_u = fmaf(x.r, dz_psi, sums.dz_u);
      sums.dc = fmaf(x.distance_by_c, dz_rate, fmaf(-x.by_c, dz_psi, sums.dc));
      sums.dm = fmaf(-x.by_m, dz_psi, sums.dm);
    }
  }
  return sums;
}

// ---- Gradients ----------------------------------------------------------------------------------

// Sums over all pairs of one head, as the blocks write them (kFireSums numbers).
struct FireSlot {
  static constexpr int kSegments = kFireUnits + 1;
  // The sums of tiles whose lowest u is above `segment` breaks.
  static constexpr SBTRAIN_HOST_DEVICE int segment(int segment) { return segment; }
  // The sums of the parts above the break of this rank, in tiles that it cuts.
  static constexpr SBTRAIN_HOST_DEVICE int behind(int rank) { return kSegments + rank; }
  static constexpr SBTRAIN_HOST_DEVICE int parameters() { return kSegments + kFireUnits; }
  static constexpr int kSlots = kSegments + kFireUnits + 1;  // of two numbers each
};
static_assert(2 * FireSlot::kSlots == kFireSums);

struct FireUnitSums {
  double dz, dz_u;
};
// The sums over the pairs for which a unit is active.
SBTRAIN_HOST_DEVICE FireUnitSums fire_unit_sums(const double* sums, float w1, float b1, int rank) {
  FireUnitSums all = {0.0, 0.0};
  FireUnitSums behind = {sums[2 * FireSlot::behind(rank)], sums[2 * FireSlot::behind(rank) + 1]};
  for (int s = 0; s < FireSlot::kSegments; ++s) {
    all.dz += sums[2 * s];
    all.dz_u += sums[2 * s + 1];
    if (s > rank) {
      behind.dz += sums[2 * s];
      behind.dz_u += sums[2 * s + 1];
    }
  }
  if (w1 == 0.0f) return b1 > 0.0f ? all : FireUnitSums{0.0, 0.0};
  return w1 > 0.0f ? behind : FireUnitSums{all.dz - behind.dz, all.dz_u - behind.dz_u};
}

}  // namespace sbtrain::kernels
