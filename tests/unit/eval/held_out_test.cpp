// Held-out text: which of its tokens count as targets, against a walk over the documents that knows
// nothing of rows, batches and ranks.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "eval/perplexity.h"
#include "unit/data/stores.h"

namespace sbtrain {
namespace {

using test::Documents;
using test::TemporaryFolder;

using Lengths = std::vector<int64_t>;  // of the documents of a store

// Stores whose tokens count up from 1 through all of them, so that none is padding.
class Stores {
 public:
  explicit Stores(const std::vector<Lengths>& stores) : stores_(stores) {
    int32_t next = 1;
    const int64_t vocab = tokens() + 1;
    for (size_t s = 0; s < stores_.size(); ++s) {
      Documents documents;
      for (const int64_t length : stores_[s]) {
        documents.emplace_back(static_cast<size_t>(length));
        std::iota(documents.back().begin(), documents.back().end(), next);
        next += static_cast<int32_t>(length);
      }
      options_.paths.push_back(folder_ / ("store" + std::to_string(s) + ".h5"));
      test::write_store(options_.paths.back(), documents, vocab);
    }
    options_.vocab = vocab;
  }

  int64_t tokens(size_t store) const {
    return std::accumulate(stores_[store].begin(), stores_[store].end(), int64_t{0});
  }
  int64_t tokens() const {
    int64_t sum = 0;
    for (size_t s = 0; s < stores_.size(); ++s) sum += tokens(s);
    return sum;
  }
  HeldOutOptions options() const { return options_; }

  // The target of each token: the next one of its document or, across documents, of its store.
  std::map<int32_t, int32_t> targets(bool across) const {
    std::map<int32_t, int32_t> result;
    int32_t token = 1;
    for (size_t s = 0; s < stores_.size(); ++s) {
      const auto store_end = token + static_cast<int32_t>(tokens(s));
      for (const int64_t length : stores_[s]) {
        const auto document_end = token + static_cast<int32_t>(length);
        for (; token < document_end; ++token) {
          if (token + 1 < (across ? store_end : document_end)) result[token] = token + 1;
        }
      }
    }
    return result;
  }
  // The row of L tokens of its store in which a token lies.
  std::pair<size_t, int64_t> row_of(int32_t token, int64_t length) const {
    int64_t index = token - 1;
    size_t store = 0;
    for (; index >= tokens(store); ++store) index -= tokens(store);
    return {store, index / length};
  }

 private:
  std::vector<Lengths> stores_;
  TemporaryFolder folder_;
  HeldOutOptions options_;
};

// What all ranks see together.
struct Seen {
  std::map<int32_t, int32_t> targets;  // by their inputs
  std::set<int32_t> inputs;            // without padding
  int64_t valid = 0;
};
Seen see(HeldOutOptions options, int world) {
  Seen seen;
  for (int rank = 0; rank < world; ++rank) {
    options.rank = rank;
    options.world = world;
    const HeldOut held_out(options);
    for (int64_t i = 0; i < held_out.batches(); ++i) {
      const PackedBatch batch = held_out.batch(i);
      seen.valid += batch.valid_targets;
      for (size_t t = 0; t < batch.tokens.size(); ++t) {
        const int32_t token = batch.tokens[t];
        if (token == 0) continue;
        EXPECT_TRUE(seen.inputs.insert(token).second) << token << " is read twice";
        if (batch.targets[t] >= 0) seen.targets[token] = batch.targets[t];
      }
    }
  }
  return seen;
}

const std::vector<std::vector<Lengths>>& examples() {
  static const std::vector<std::vector<Lengths>> kExamples = {
      {{40, 0, 3, 77, 1, 32, 64, 31, 33, 10}},
      {{7}},
      {{16, 16, 16}},  // documents that end with rows
      {{17, 2, 0, 30}, {1}, {64, 5, 12}},
      {{33}, {33}, {33}},
  };
  return kExamples;
}

// All short ones, and long ones beside which rows and documents of the examples end.
std::vector<int64_t> lengths_up_to(int64_t most) {
  std::vector<int64_t> lengths;
  for (int64_t length = 1; length <= most; ++length) {
    if (length < 10 || length % 16 < 2 || most - length < 4) lengths.push_back(length);
  }
  return lengths;
}

TEST(HeldOut, CountsEveryTargetWhereAllIsAskedFor) {
  for (const std::vector<Lengths>& lengths : examples()) {
    const Stores stores(lengths);
    HeldOutOptions options = stores.options();
    for (const bool across : {false, true}) {
      options.predict_across_documents = across;
      const std::map<int32_t, int32_t> expected = stores.targets(across);
      for (const int64_t length : lengths_up_to(stores.tokens() + 2)) {
        options.sequence_length = length;
        for (const int64_t tokens : {stores.tokens(), int64_t{1} << 60}) {
          options.max_tokens = tokens;
          options.micro_batch = 1 + tokens % 3;
          for (const int world : {1, 2}) {
            const Seen seen = see(options, world);
            ASSERT_EQ(seen.targets, expected)
                << "L " << length << ", at most " << tokens << " tokens, " << world << " ranks";
            ASSERT_EQ(seen.valid, static_cast<int64_t>(expected.size()));
          }
        }
      }
    }
  }
}

// Fewer tokens than there are: whole rows, as many as fit into the share of each store.
TEST(HeldOut, CountsTheTargetsOfWholeRowsWhereFewerTokensAreAskedFor) {
  for (const std::vector<Lengths>& lengths : examples()) {
    const Stores stores(lengths);
    HeldOutOptions options = stores.options();
    for (const bool across : {false, true}) {
      options.predict_across_documents = across;
      const std::map<int32_t, int32_t> all_targets = stores.targets(across);
      for (const int64_t length : {1, 5, 16, 33}) {
        options.sequence_length = length;
        for (const int64_t tokens : {length - 1, length, length + 1, 3 * length - 1, 3 * length,
                                     3 * length + 1, stores.tokens() - 1}) {
          if (tokens < 1 || tokens >= stores.tokens()) continue;  // both sides of a row
          options.max_tokens = tokens;
          const Seen seen = see(options, 1);
          std::map<size_t, std::set<int64_t>> rows;  // of each store
          for (const int32_t token : seen.inputs) {
            const auto [store, row] = stores.row_of(token, length);
            rows[store].insert(row);
          }
          for (size_t s = 0; s < lengths.size(); ++s) {
            const int64_t share = stores.tokens(s) * tokens / stores.tokens();
            ASSERT_EQ(static_cast<int64_t>(rows[s].size()), std::max<int64_t>(1, share / length))
                << "store " << s << ", L " << length << ", at most " << tokens << " tokens";
          }
          std::map<int32_t, int32_t> expected;
          for (const auto& [input, target] : all_targets) {
            const auto [store, row] = stores.row_of(input, length);
            if (rows[store].contains(row)) expected[input] = target;
          }
          ASSERT_EQ(seen.targets, expected) << "L " << length << ", at most " << tokens;
          ASSERT_EQ(see(options, 2).targets, expected) << "two ranks";
        }
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain
