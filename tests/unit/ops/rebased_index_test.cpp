// The index arithmetic of the CUDA kernels of Based and ReBased, on the host.
#include "kernels/attention/rebased_index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "ops/rebased.h"

namespace sbtrain::kernels {
namespace {

TEST(RebasedIndex, RowsAndFactorsAreInverse) {
  for (const bool lower : {false, true}) {
    for (int f = 1; f <= kMaxRebasedFeatures; ++f) {
      const int rows = rebased_rows(f, lower);
      EXPECT_EQ(rows, ops::rebased_state_rows(f, {.linear = lower ? 1.0f : 0.0f}));
      std::set<int> seen;
      for (int a = 0; a < f; ++a) {
        for (int b = a; b < f; ++b) {
          const int row = rebased_row(f, lower, a, b);
          EXPECT_EQ(rebased_row(f, lower, b, a), row);
          EXPECT_EQ(rebased_factors(f, lower, row).a, a);
          EXPECT_EQ(rebased_factors(f, lower, row).b, b);
          seen.insert(row);
        }
      }
      if (lower) {
        EXPECT_EQ(rebased_factors(f, lower, 0).a, f);
        EXPECT_EQ(rebased_factors(f, lower, 0).b, f);
        seen.insert(0);
        for (int a = 0; a < f; ++a) {
          EXPECT_EQ(rebased_factors(f, lower, 1 + a).a, a);
          EXPECT_EQ(rebased_factors(f, lower, 1 + a).b, f);
          seen.insert(1 + a);
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), rows);
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), rows - 1);
    }
  }
}

std::vector<int> positions_of(const std::vector<int>& documents) {
  std::vector<int> positions;
  for (const int length : documents) {
    for (int i = 0; i < length; ++i) positions.push_back(i);
  }
  return positions;
}

const std::vector<std::vector<int>> kPacks = {{1},
                                              {128},
                                              {129},
                                              {127, 1, 128, 1},
                                              {1, 127, 256, 128},
                                              {700},
                                              {1, 2, 127, 128, 129, 500, 1},
                                              {100, 28, 300, 84, 1, 5},
                                              {130, 126, 1, 600, 3}};

// In both forms every key of a query's document counts once: as a pair, or in the state that the
// kernels' scan carries into the query's chunk. The same holds, from the right, for a key's
// queries.
TEST(RebasedIndex, PairsAndStatesSeeEveryKeyOnce) {
  for (const std::vector<int>& pack : kPacks) {
    const std::vector<int> position = positions_of(pack);
    const int tokens = static_cast<int>(position.size());
    const int chunks = static_cast<int>(rebased_chunks(tokens));
    const auto last_of = [&](int chunk) {
      return std::min((chunk + 1) * kRebasedChunk, tokens) - 1;
    };
    const auto passes = [&](int chunk) {
      return sees_rebased_state(last_of(chunk), position[last_of(chunk)]);
    };
    std::vector<std::multiset<int>> keys_in(chunks), queries_behind(chunks);
    std::multiset<int> running;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      keys_in[chunk] = running;
      const int last = last_of(chunk);
      if (!passes(chunk)) running.clear();
      for (int t = first_in_rebased_state(last, position[last]); t <= last; ++t) running.insert(t);
    }
    running.clear();
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
      queries_behind[chunk] = running;
      if (!passes(chunk)) running.clear();
      for (int t = chunk * kRebasedChunk; t <= last_of(chunk); ++t) {
        if (sees_rebased_state(t, position[t])) running.insert(t);
      }
    }
    std::map<int, std::multiset<int>> queries_of;
    for (int query = 0; query < tokens; ++query) {
      std::multiset<int> all, chunked;
      for (int key = first_rebased_key(query, position[query], false); key <= query; ++key) {
        all.insert(key);
        queries_of[key].insert(query);
      }
      ASSERT_EQ(static_cast<int>(all.size()), position[query] + 1);
      for (int key = first_rebased_key(query, position[query], true); key <= query; ++key) {
        chunked.insert(key);
      }
      if (sees_rebased_state(query, position[query])) {
        const auto& earlier = keys_in[query / kRebasedChunk];
        chunked.insert(earlier.begin(), earlier.end());
      }
      ASSERT_EQ(all, chunked) << "query " << query;
    }
    for (int key = 0; key < tokens; ++key) {
      std::multiset<int> chunked;
      const int chunk = key / kRebasedChunk;
      const int last = last_of(chunk);
      for (int query = key; query <= last; ++query) {
        if (first_rebased_key(query, position[query], true) <= key) chunked.insert(query);
      }
      if (key >= first_in_rebased_state(last, position[last])) {
        chunked.insert(queries_behind[chunk].begin(), queries_behind[chunk].end());
      }
      ASSERT_EQ(queries_of[key], chunked) << "key " << key;
    }
  }
}

}  // namespace
}  // namespace sbtrain::kernels
