// The visible keys of queries against the definition: every option, and packs whose documents begin
// at any place.
#include <algorithm>
#include <climits>

#include "gpu/device.h"
#include "kernels/attention/visibility.cuh"

namespace sbtrain::test::visibility_test {
namespace {

using namespace kernels;  // NOLINT: nearly every name here is from there
using Seeing = GpuTest;

struct Pack {
  explicit Pack(const std::vector<int>& lengths) : cu_seqlens{0} {
    for (const int length : lengths) {
      for (int i = 0; i < length; ++i) positions.push_back(i);
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    for (size_t i = 0; i < positions.size(); ++i) {
      stop.push_back(static_cast<int>(i * 7 % static_cast<size_t>(positions[i] + 1)));
    }
    // First keys never decrease within a document.
    for (size_t i = 1; i < stop.size(); ++i) {
      if (positions[i] > 0) stop[i] = std::max(stop[i], stop[i - 1]);
    }
  }
  int tokens() const { return static_cast<int>(positions.size()); }
  std::vector<int> positions, cu_seqlens, stop;
};

struct Options {
  int window = 0;
  bool own_chunk = false, own_key = true, stopped = false, ends_with_pack = false;
};

bool sees(const Pack& pack, const Options& o, int query, int key) {
  if (query >= pack.tokens() || key >= pack.tokens() || key > query) return false;
  const int begin = query - pack.positions[static_cast<size_t>(query)];
  if (key < begin || (key == query && !o.own_key)) return false;
  if (o.window > 0 && query - key >= o.window) return false;
  if (o.own_chunk && key / kRebasedChunk != query / kRebasedChunk) return false;
  return !o.stopped || key >= begin + pack.stop[static_cast<size_t>(query)];
}

constexpr int kWarpQueries = 32;

// first and end key of each query by both kinds of warps, end_query of each key; some and all of
// blocks of 64 keys, for each warp of 32 queries.
__global__ void visibility_kernel(Visibility seen, int* keys, int* queries, int* blocks,
                                  float* masked) {
  const int first = static_cast<int>(blockIdx.x) * kWarpQueries;
  const int columns = (seen.tokens + 63) / 64;
  const RowKeys<2> rows(seen, first);
  for (int i = 0; i < 4; ++i) {
    const int query = first + lane_row() + 8 * i;
    keys[2 * query] = rows.begin[i];
    keys[2 * query + 1] = rows.end[i];
  }
  const int token = first + lane();
  if (token < seen.tokens) queries[token] = seen.end_query(token);
  const LaneKeys<2> lanes(seen, first);
  for (int c = 0; c < columns; ++c) {
    int* const to = blocks + (static_cast<int>(blockIdx.x) * columns + c) * 4;
    to[0] = rows.some(c * 64, 64);
    to[1] = rows.all(c * 64, 64);
    to[2] = lanes.some(c * 64, 64);
    to[3] = lanes.all(c * 64, 64);
    Accumulator<2, 8> s;
    s.clear();
    lanes.mask(s, c * 64);
    s.for_each(
        [&](float x, auto at) { masked[(first + at.row) * columns * 64 + c * 64 + at.col] = x; });
  }
}

void check(const Pack& pack, const Options& o) {
  const int warps = pack.tokens() / kWarpQueries + 1, columns = (pack.tokens() + 63) / 64;
  const int rows = warps * kWarpQueries;
  OnDevice<int> positions(pack.positions), cu_seqlens(pack.cu_seqlens), stop(pack.stop);
  OnDevice<int> keys(static_cast<size_t>(2 * rows)), queries(pack.positions.size());
  OnDevice<int> blocks(static_cast<size_t>(warps * columns * 4));
  OnDevice<float> masked(static_cast<size_t>(rows * columns * 64));
  const Visibility seen{.tokens = pack.tokens(),
                        .positions = positions.data(),
                        .cu_seqlens = cu_seqlens.data(),
                        .sequences = static_cast<int>(pack.cu_seqlens.size()) - 1,
                        .reach = o.window > 0 ? o.window - 1 : INT_MAX,
                        .own_chunk = o.own_chunk,
                        .own_key = o.own_key,
                        .stopped = o.stopped,
                        .stop = stop.data(),
                        .ends_with_pack = o.ends_with_pack};
  visibility_kernel<<<static_cast<unsigned>(warps), 32>>>(seen, keys.data(), queries.data(),
                                                          blocks.data(), masked.data());
  const std::vector<int> of_query = keys.values(), of_key = queries.values(),
                         tiles = blocks.values();
  const std::vector<float> scores = masked.values();
  std::vector<int> last_query(pack.positions.size(), -1);
  for (int query = 0; query < pack.tokens(); ++query) {
    for (int key = 0; key < pack.tokens(); ++key) {
      const bool want = sees(pack, o, query, key);
      const auto at = static_cast<size_t>(2 * query);
      ASSERT_EQ(key >= of_query[at] && key < of_query[at + 1], want) << query << ", " << key;
      if (want) last_query[static_cast<size_t>(key)] = query;
      if (!o.own_key) continue;
      ASSERT_EQ(scores[static_cast<size_t>(query * columns * 64 + key)] == 0.0f, want)
          << query << ", " << key;
    }
  }
  for (int key = 0; key < pack.tokens(); ++key) {
    const auto at = static_cast<size_t>(key);
    // end_query is an upper bound that does not take stops into account.
    ASSERT_GT(of_key[at], last_query[at]) << key;
    if (o.own_key && !o.stopped) ASSERT_EQ(of_key[at], last_query[at] + 1) << key;
  }
  for (int i = 0; i < rows; ++i) {
    if (i < pack.tokens() || !o.ends_with_pack) continue;
    EXPECT_GE(of_query[static_cast<size_t>(2 * i)], of_query[static_cast<size_t>(2 * i + 1)]) << i;
  }
  for (int w = 0; w < warps; ++w) {
    for (int c = 0; c < columns; ++c) {
      bool some = false, all = true;
      for (int query = w * kWarpQueries; query < (w + 1) * kWarpQueries; ++query) {
        for (int key = c * 64; key < (c + 1) * 64; ++key) {
          const bool one = sees(pack, o, query, key);
          some = some || one;
          all = all && (one || (query >= pack.tokens() && !o.ends_with_pack));
        }
      }
      for (const int i : {0, 2}) {
        const int* const tile = tiles.data() + (w * columns + c) * 4 + i;
        if (some) EXPECT_EQ(tile[0], 1) << w << ", " << c;
        if (!all) EXPECT_EQ(tile[1], 0) << w << ", " << c;
        // The test is exact for whole tiles inside one document, which must not be masked.
        if (all && (w + 1) * kWarpQueries <= pack.tokens()) EXPECT_EQ(tile[1], 1) << w << ", " << c;
      }
    }
  }
}

TEST_F(Seeing, EveryOptionIsTheDefinition) {
  for (const Pack& pack : {Pack({1}), Pack({300}), Pack({1, 2, 63, 64, 65, 127, 1, 70}),
                           Pack({256, 128}), Pack({5, 500})}) {
    check(pack, {});
    for (const int window : {1, 2, 64, 100, 1000}) check(pack, {.window = window});
    check(pack, {.own_chunk = true});
    check(pack, {.ends_with_pack = true});
    check(pack, {.own_key = false, .ends_with_pack = true});
    check(pack, {.stopped = true, .ends_with_pack = true});
    check(pack, {.own_key = false, .stopped = true, .ends_with_pack = true});
  }
}

}  // namespace
}  // namespace sbtrain::test::visibility_test
