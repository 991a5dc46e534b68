// The parts of the CUDA kernels of FIRE (kernels/attention/fire.h), run lane by lane on the host
// and compared with the definition in fp64.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/attention/fire.h"
#include "kernels/attention/position_bias.h"
#include "support/tensors.h"
#include "unit/attention/oracle.h"

namespace sbtrain::test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there

constexpr int kUnits = kFireUnits;

// One head, its units sorted by their breaks.
struct Head {
  explicit Head(const std::string& name) {
    const Owned numbers = random_normal(name, {3 * kUnits + 1}, 0.7);
    const float* x = numbers.f32();
    std::copy_n(x, kUnits, net.w1);
    std::copy_n(x + kUnits, kUnits, net.b1);
    std::copy_n(x + 2 * kUnits, kUnits, w2);
    b2 = x[3 * kUnits];
  }
  void sort() {
    breaks.assign(kUnits, NAN);
    bends.assign(kUnits, NAN);
    for (int k = 0; k < kUnits; ++k) {
      ranks[k] = fire_rank(net, k);
      breaks[static_cast<size_t>(ranks[k])] = fire_break(net.w1[k], net.b1[k]);
      bends[static_cast<size_t>(ranks[k])] = fire_bend(net.w1[k], w2[k]);
    }
  }
  int below(float u) const {
    int count = 0;
    for (const float at : breaks) count += at < u;
    return count;
  }
  FireLine line(int segment) const { return fire_line(net, w2, b2, ranks, segment); }
  // The oracle's problem with this head's parameters.
  oracle::Problem problem() const {
    oracle::Problem p;
    p.fire = {c, m};
    p.fire.insert(p.fire.end(), net.w1, net.w1 + kUnits);
    p.fire.insert(p.fire.end(), net.b1, net.b1 + kUnits);
    p.fire.insert(p.fire.end(), w2, w2 + kUnits);
    p.fire.push_back(b2);
    return p;
  }

  float c = 0.1f, m = 0.1f;
  FireNetwork net{};
  float w2[kUnits] = {}, b2 = 0;
  int ranks[kUnits] = {};
  std::vector<float> breaks, bends;
};

struct NamedHead {
  std::string name;
  Head head;
};
std::vector<NamedHead> heads() {
  std::vector<NamedHead> all;
  const auto add = [&](const std::string& name, const auto& change) {
    Head head(name);
    change(head);
    head.sort();
    all.push_back({name, head});
  };
  add("any", [](Head&) {});
  add("flat", [](Head& h) { std::fill_n(h.net.w1, kUnits, 0.0f); });
  add("some flat", [](Head& h) { std::fill_n(h.net.w1, kUnits / 2, 0.0f); });
  add("falling", [](Head& h) {
    for (float& w : h.net.w1) w = -std::abs(w);
  });
  add("outside", [](Head& h) {
    for (int k = 0; k < kUnits; ++k) h.net.b1[k] = k % 3 == 0 ? 5.0f : -5.0f;
  });
  add("one break", [](Head& h) {
    for (int k = 0; k < kUnits; ++k) h.net.b1[k] = -0.5f * h.net.w1[k];
  });
  add("all breaks inside", [](Head& h) {
    for (int k = 0; k < kUnits; ++k) h.net.b1[k] = -0.03f * static_cast<float>(k) * h.net.w1[k];
  });
  add("negative c and m", [](Head& h) { h.c = -0.5f, h.m = -0.3f; });
  add("c near 0", [](Head& h) { h.c = 1e-5f; });
  add("no c", [](Head& h) { h.c = 0.0f; });
  add("no m", [](Head& h) { h.m = 0.0f; });
  return all;
}

TEST(Fire, LinesAndBendsAreTheNetwork) {
  for (const NamedHead& named : heads()) {
    const std::string& name = named.name;
    const Head& head = named.head;
    for (int n = 0; n <= 1000; ++n) {
      const float u = static_cast<float>(n) / 1000.0f;
      double expected = head.b2;
      for (int k = 0; k < kUnits; ++k) {
        expected += head.w2[k] * std::max(0.0, double{head.net.w1[k]} * u + head.net.b1[k]);
      }
      const int segment = head.below(u);
      const FireLine line = head.line(segment);
      EXPECT_NEAR(line.slope * u + line.intercept, expected, 1e-5) << name << ", u " << u;
      const int low = head.below(u / 2);
      const FireLine first = head.line(low);
      double bent = first.slope * u + first.intercept;
      for (int k = low; k < segment; ++k) bent += head.bends[k] * (u - head.breaks[k]);
      EXPECT_NEAR(bent, expected, 1e-5) << name << ", u " << u;
    }
  }
}

// A tile of one lane, 32 rows and columns in all.
constexpr int kRows = 4, kColBlocks = 4, kTile = 32;
struct Tile {
  float at[kRows / 2][kColBlocks][4] = {};
};
constexpr int kLength = 200, kMargin = 64;

struct Tables {
  explicit Tables(const Head& head) {
    for (int n = -kMargin; n < kLength + kMargin; ++n) {
      distances.push_back(fire_distance(head.c, n));
      queries.push_back(fire_query(head.c, head.m, kFireLength, std::max(0, n)));
    }
  }
  const FireDistance& distance(int n) const {
    return distances.at(static_cast<size_t>(n + kMargin));
  }
  const FireQuery& query(int j) const { return queries.at(static_cast<size_t>(j + kMargin)); }
  std::vector<FireDistance> distances;
  std::vector<FireQuery> queries;
};

// The breaks that lie within a tile of 32 queries and keys.
struct Breaks {
  Breaks(const Head& head, const Tables& tables, int query, int key) {
    float low_r = INFINITY, high_r = 0;
    for (int j = query; j < query + kTile; ++j) {
      low_r = std::min(low_r, tables.query(j).r);
      high_r = std::max(high_r, tables.query(j).r);
    }
    low = head.below(tables.distance(query - key - kTile + 1).psi * low_r);
    high = head.below(tables.distance(query - key + kTile - 1).psi * high_r);
  }
  int low, high;
};

// Whether FIRE treats the 32 queries from `query` on alike.
bool same_queries(const Tables& tables, int query) {
  const FireQuery& one = tables.query(query);
  for (int j = query; j < query + kTile; ++j) {
    const FireQuery& x = tables.query(j);
    if (x.r != one.r || x.by_c != one.by_c || x.by_m != one.by_m) return false;
  }
  return true;
}
using Diagonals = FireDiagonals<kRows, kColBlocks>;
constexpr int kDiagonals = Diagonals::kDiagonals;
constexpr int kFirstDiagonal = 8 * (kColBlocks - 1);

// Calls body(tile, lane's first row, lane's first column) for each lane.
template <typename Body>
void for_each_lane(Body&& body) {
  for (int lane = 0; lane < 32; ++lane) {
    Tile tile;
    body(tile, lane / 4, lane % 4 * 2);
  }
}

template <int kSign>
void expect_scores(const std::string& name, const Head& head, int query, int key) {
  const Tables tables(head);
  const Breaks breaks(head, tables, query, key);
  const oracle::Problem p = head.problem();
  const FireLine line = head.line(breaks.low);
  for_each_lane([&](Tile& tile, int row, int col) {
    const int distance = kSign > 0 ? query + row - key - col : query + col - key - row;
    const auto psi = [&](int offset) { return tables.distance(distance + offset).psi; };
    const auto r = [&](int i, int c, int odd) {
      return tables.query(query + (kSign > 0 ? row + 8 * i : col + 8 * c + odd)).r;
    };
    const auto score = [&]<int kTileRows, int kTileCols>(auto& x, auto&& r_of, auto&& psi_of) {
      fire_score<kSign, kTileRows, kTileCols>(x, 1.0f, static_cast<float>(line.slope),
                                              static_cast<float>(line.intercept), r_of, psi_of);
      for (int k = breaks.low; k < breaks.high; ++k) {
        fire_bend_score<kSign, kTileRows, kTileCols>(x, head.breaks[k], head.bends[k], r_of,
                                                     psi_of);
      }
    };
    if (same_queries(tables, query)) {
      Diagonals bias;
      score.template operator()<kDiagonals, 1>(
          bias, [&](int, int, int) { return tables.query(query).r; },
          [&](int offset) { return psi(offset - kSign * kFirstDiagonal); });
      bias.for_each(tile, [](float& x, float y) { x += y; });
    } else {
      score.template operator()<kRows, kColBlocks>(tile, r, psi);
    }
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kColBlocks; ++c) {
        for (int odd = 0; odd < 2; ++odd) {
          const int in_row = row + 8 * i, in_col = col + 8 * c + odd;
          const int j = query + (kSign > 0 ? in_row : in_col);
          const int n = key + (kSign > 0 ? in_col : in_row);
          if (n > j) continue;
          EXPECT_NEAR(tile.at[i / 2][c][i % 2 * 2 + odd], oracle::fire_bias(p, 0, j, n, 0, nullptr),
                      3e-5)
              << name << ", query " << j << ", key " << n;
        }
      }
    }
  });
}

TEST(Fire, TilesOfEitherOrientation) {
  for (const NamedHead& named : heads()) {
    const std::string& name = named.name;
    const Head& head = named.head;
    for (const auto& [query, key] : {std::pair{0, 0}, {32, 0}, {160, 0}, {64, 48}, {96, 111}}) {
      expect_scores<1>(name, head, query, key);
      expect_scores<-1>(name, head, query, key);
    }
  }
}

// Forms gradients as the thread blocks do: sums by segment and after breaks, over all tiles of a
// document.
TEST(Fire, GradientsFromSums) {
  const Owned noise = random_normal("dz", {kLength, kLength});
  const auto dz_of = [&](int j, int i) {
    return i <= j && j < kLength ? noise.f32()[j * kLength + i] : 0.0f;
  };
  for (const NamedHead& named : heads()) {
    const std::string& name = named.name;
    const Head& head = named.head;
    const Tables tables(head);
    std::vector<double> slots(kFireSums, 0.0);
    const auto add = [&](int slot, double x, double y) {
      slots[static_cast<size_t>(2 * slot)] += x;
      slots[static_cast<size_t>(2 * slot + 1)] += y;
    };
    for (int key = 0; key < kLength; key += kTile) {
      for (int query = key; query < kLength; query += kTile) {
        const Breaks breaks(head, tables, query, key);
        for_each_lane([&](Tile& tile, int row, int col) {
          for (int i = 0; i < kRows; ++i) {
            for (int c = 0; c < kColBlocks; ++c) {
              for (int odd = 0; odd < 2; ++odd) {
                tile.at[i / 2][c][i % 2 * 2 + odd] =
                    dz_of(query + col + 8 * c + odd, key + row + 8 * i);
              }
            }
          }
          const int distance = query + col - key - row;
          const auto of_distance = [&](int offset) { return tables.distance(distance + offset); };
          const auto of_query = [&](int c, int odd) {
            return tables.query(query + col + 8 * c + odd);
          };
          const auto add_sums = [&]<int kTileRows, int kTileCols>(auto& x, auto&& query_of,
                                                                  auto&& at) {
            const FireTileSums all =
                fire_tile_sums<true, kTileRows, kTileCols>(x, 0.0f, query_of, at);
            const double slope = head.line(breaks.low).slope;
            add(FireSlot::segment(breaks.low), all.dz, all.dz_u);
            add(FireSlot::parameters(), slope * all.dc, slope * all.dm);
            for (int k = breaks.low; k < breaks.high; ++k) {
              const FireTileSums behind =
                  fire_tile_sums<false, kTileRows, kTileCols>(x, head.breaks[k], query_of, at);
              add(FireSlot::behind(k), behind.dz, behind.dz_u);
              add(FireSlot::parameters(), head.bends[k] * behind.dc, head.bends[k] * behind.dm);
            }
          };
          if (same_queries(tables, query)) {
            Diagonals sums;
            sums.for_each(tile, [](float x, float& sum) { sum += x; });
            add_sums.template operator()<kDiagonals, 1>(
                sums, [&](int, int) { return tables.query(query); },
                [&](int offset) { return of_distance(offset + kFirstDiagonal); });
          } else {
            add_sums.template operator()<kRows, kColBlocks>(tile, of_query, of_distance);
          }
        });
      }
    }

    const oracle::Problem p = head.problem();
    std::vector<double> expected(p.fire.size());
    for (int j = 0; j < kLength; ++j) {
      for (int i = 0; i <= j; ++i) oracle::fire_bias(p, 0, j, i, dz_of(j, i), &expected);
    }
    std::vector<double> actual(p.fire.size());
    actual[0] = slots[2 * FireSlot::parameters()];
    actual[1] = slots[2 * FireSlot::parameters() + 1];
    for (int k = 0; k < kUnits; ++k) {
      const float w1 = head.net.w1[k], b1 = head.net.b1[k];
      const FireUnitSums sums = fire_unit_sums(slots.data(), w1, b1, head.ranks[k]);
      actual[2 + k] = head.w2[k] * sums.dz_u;
      actual[2 + kUnits + k] = head.w2[k] * sums.dz;
      actual[2 + 2 * kUnits + k] = w1 * sums.dz_u + b1 * sums.dz;
    }
    expected.pop_back();  // the gradient of b2
    actual.pop_back();
    const auto part = [](const std::vector<double>& x, int first, int count) {
      return std::vector<double>(x.begin() + first, x.begin() + first + count);
    };
    const auto expect_near = [&](int i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-4 * (1 + std::abs(expected[i]))) << name << ", " << i;
    };
    if (head.c != 0.0f) expect_near(0);  // at 0 the oracle takes the derivative from the right
    expect_near(1);
    EXPECT_LE(relative_error(part(actual, 2, 3 * kUnits), part(expected, 2, 3 * kUnits)), 1e-5)
        << name;
  }
}

}  // namespace
}  // namespace sbtrain::test
