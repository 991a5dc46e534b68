// Windows of documents: the tokens that they hold, and the losses that the model gives them.
#include "eval/windows.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <tuple>

#include "support/model.h"
#include "unit/data/stores.h"

namespace sbtrain {
namespace {

using test::Documents;
using test::TemporaryFolder;

// A store whose tokens are their own index, and a reader of it.
struct Numbered {
  explicit Numbered(const std::vector<int64_t>& lengths)
      : documents(test::numbered_documents(lengths)) {
    const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    test::write_store(folder / "store.h5", documents, tokens);
    reader = std::make_unique<WindowReader>(options(tokens));
  }
  HeldOutOptions options(int64_t vocab) const {
    HeldOutOptions options;
    options.paths = {folder / "store.h5"};
    options.vocab = vocab;
    return options;
  }
  TemporaryFolder folder;
  Documents documents;
  std::unique_ptr<WindowReader> reader;
};

// How often each token is a counted target, and its smallest number of context tokens.
struct Seen {
  std::map<int32_t, int> times;
  std::map<int32_t, int64_t> context;
};
Seen see(const WindowReader& reader, const std::vector<Window>& windows, int64_t length) {
  Seen seen;
  reader.score(*make_single_control(), windows, 64, length,
               [&](const PackedBatch& batch, int64_t max_seqlen) {
                 EXPECT_EQ(max_seqlen, length);
                 EXPECT_EQ(batch.tokens.size() % static_cast<size_t>(length), 0U);
                 int64_t valid = 0;
                 for (size_t t = 0; t < batch.targets.size(); ++t) {
                   if (batch.targets[t] < 0) continue;
                   EXPECT_EQ(batch.targets[t], batch.tokens[t] + 1);
                   ++seen.times[batch.targets[t]];
                   seen.context[batch.targets[t]] = batch.positions[t] + 1;
                   ++valid;
                 }
                 EXPECT_EQ(valid, batch.valid_targets);
                 return std::vector<float>(batch.tokens.size(), 0.0f);
               });
  return seen;
}

TEST(Windows, OfOneLengthLieSideBySide) {
  const Numbered data({10, 3, 25, 12, 1});
  const std::vector<Window> windows = data.reader->of_length(6, 1000);
  std::vector<std::pair<int64_t, int64_t>> places;
  for (const Window& window : windows) {
    EXPECT_EQ(window.length, 6);
    EXPECT_EQ(window.skip, 0);
    places.emplace_back(window.document, window.begin);
  }
  EXPECT_EQ(places, (std::vector<std::pair<int64_t, int64_t>>{
                        {0, 0}, {2, 0}, {2, 6}, {2, 12}, {2, 18}, {3, 0}, {3, 6}}));
  // The last token of a document predicts nothing.
  EXPECT_EQ(see(*data.reader, windows, 6).times.size(), 7U * 6 - 1);
  const WindowScores scores = data.reader->score(
      *make_single_control(), windows, 12, 6, [](const PackedBatch& batch, int64_t /*max_seqlen*/) {
        EXPECT_LE(batch.tokens.size(), 12U);
        return std::vector<float>(batch.tokens.size(), 0.0f);
      });
  EXPECT_EQ(scores.windows, 7);
  EXPECT_EQ(scores.documents, 3);
}

TEST(Windows, KeepToTheirTokens) {
  const Numbered data({10, 3, 25, 12, 1});
  EXPECT_EQ(data.reader->of_length(6, 18).size(), 3U);
  EXPECT_EQ(data.reader->of_length(6, 1).size(), 1U);
  EXPECT_EQ(data.reader->of_length(25, 1).size(), 1U);
  EXPECT_TRUE(data.reader->of_length(26, 1000).empty());
  EXPECT_EQ(data.reader->longest_document(), 25);
  // The chosen windows are spread over all of them; they are not the first ones.
  EXPECT_EQ(data.reader->of_length(6, 18)[1].document, 2);
}

TEST(Windows, SameTargetsWithGrowingContexts) {
  const Numbered data({10, 40, 25, 16});
  const std::vector<Window> longest = data.reader->of_length(16, 1000);
  std::map<int64_t, Seen> seen;
  for (const int64_t length : {4, 8, 16}) {
    seen[length] = see(*data.reader, WindowReader::last_tokens(longest, length, 4), length);
  }
  EXPECT_EQ(seen[4].times.size(), 4U * 4 - 1);  // one window ends with its document
  EXPECT_EQ(seen[4].times, seen[8].times);
  EXPECT_EQ(seen[4].times, seen[16].times);
  for (const auto& [token, context] : seen[4].context) {
    EXPECT_EQ(seen[8].context[token], context + 4);
    EXPECT_EQ(seen[16].context[token], context + 12);
  }
}

TEST(Windows, LastTargetsWithContextsOfOneSize) {
  const Numbered data({10, 140, 25, 64});
  const std::vector<Window> windows = data.reader->of_length(64, 1000);
  const Seen full =
      see(*data.reader, WindowReader::last_targets(windows, /*targets=*/24, /*context=*/64), 64);
  EXPECT_EQ(full.times.size(), 3U * 24 - 1);  // one window ends with its document
  for (const int64_t context : {1, 4, 8, 16, 32, 48, 64}) {
    SCOPED_TRACE(context);
    const Seen seen = see(*data.reader, WindowReader::last_targets(windows, 24, context), context);
    EXPECT_EQ(seen.times, full.times);
    for (const auto& [token, tokens] : seen.context) {
      EXPECT_LE(tokens, context);
      // All of the window where it has no more.
      EXPECT_GE(tokens, std::min(full.context.at(token), context - context / 8 + (context >= 8)));
    }
  }
  // The full context is all that the window has before a target: 41 to 64 tokens.
  for (const auto& [token, tokens] : full.context) EXPECT_GE(tokens, 41) << token;
}

TEST(Windows, LossesByDocumentAddUp) {
  const Numbered data({10, 3, 25, 12, 1});
  const std::vector<Window> windows = data.reader->of_length(6, 1000);
  const auto losses = [](const PackedBatch& batch, int64_t /*max_seqlen*/) {
    std::vector<float> losses;
    for (const int32_t target : batch.targets) {
      losses.push_back(target < 0 ? 0.0f : static_cast<float>(target));
    }
    return losses;
  };
  const WindowScores scores = data.reader->score(*make_single_control(), windows, 12, 6, losses);
  ASSERT_EQ(scores.by_document.size(), 3U);
  // The documents begin with the tokens 0, 13 and 38; a target is the token after its position.
  const std::vector<std::tuple<int64_t, int64_t, double>> expected = {
      {0, 6, 21.0}, {2, 24, 24 * 13 + 300.0}, {3, 11, 11 * 38 + 66.0}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [document, tokens, loss_sum] = expected[i];
    EXPECT_EQ(scores.by_document[i].store, 0U);
    EXPECT_EQ(scores.by_document[i].document, document);
    EXPECT_EQ(scores.by_document[i].tokens, tokens);
    EXPECT_EQ(scores.by_document[i].loss_sum, loss_sum);
  }
}

TEST(Windows, SlidingPredictsEveryTokenOnce) {
  const Numbered data({10, 1, 3, 40, 25, 2});
  for (const int64_t length : {1, 5, 8, 50}) {
    for (int64_t stride = 1; stride <= length; ++stride) {
      SCOPED_TRACE(fmt::format("windows of {}, stride {}", length, stride));
      const std::vector<Window> windows = data.reader->sliding(length, stride, 1000);
      const Seen seen = see(*data.reader, windows, length);
      for (const std::vector<int32_t>& document : data.documents) {
        EXPECT_FALSE(seen.times.contains(document.front()));
        for (size_t i = 1; i < document.size(); ++i) {
          ASSERT_TRUE(seen.times.contains(document[i])) << document[i];
          EXPECT_EQ(seen.times.at(document[i]), 1);
          const int64_t context = seen.context.at(document[i]);
          EXPECT_GE(context, std::min<int64_t>(static_cast<int64_t>(i), length - stride + 1));
          EXPECT_LE(context, length);
        }
      }
    }
  }
}

TEST(Windows, SlidingKeepsToItsTokens) {
  const Numbered data({10, 1, 3, 40, 25, 2});
  for (int64_t tokens = 1; tokens < 80; ++tokens) {
    const std::vector<Window> windows = data.reader->sliding(8, 3, tokens);
    EXPECT_EQ(static_cast<int64_t>(see(*data.reader, windows, 8).times.size()),
              std::min<int64_t>(tokens, 9 + 2 + 39 + 24 + 1));
  }
}

// The losses by length equal those of a model that runs each window alone, position by position.
TEST(Windows, LossesAreThoseOfTheModelOnEachWindowAlone) {
  constexpr int64_t kVocab = 50;
  const TemporaryFolder folder;
  const Documents documents = test::random_documents(1, 7, 5, 40, kVocab);
  test::write_store(folder / "store.h5", documents, kVocab);
  HeldOutOptions options;
  options.paths = {folder / "store.h5"};
  options.vocab = kVocab;
  const WindowReader reader(options);

  ModelConfig config;
  config.layers = 2;
  config.width = 16;
  config.inner = 24;
  config.heads = 2;
  config.vocab = kVocab;
  config.init_std = 0.5;
  const auto losses_of = [&](const PackedBatch& batch) {
    test::ModelRun run(Backend::kCpu, config, batch);
    const Buffer loss_T = run.reals(run.batch().tokens(), 1);
    run.model().evaluate(run.stream(), run.params(), run.batch(),
                         loss_T.tensor().reshaped({run.batch().tokens()}));
    return run.download(loss_T);
  };

  constexpr int64_t kLength = 12;
  const std::vector<Window> windows = reader.of_length(kLength, 1000);
  ASSERT_GT(windows.size(), 3U);
  const WindowScores scores = reader.score(
      *make_single_control(), windows, 3 * kLength, kLength,
      [&](const PackedBatch& batch, int64_t /*max_seqlen*/) { return losses_of(batch); });

  // Computes the losses from the logits of each window alone.
  std::vector<double> sums(kLength);
  std::vector<int64_t> counts(kLength);
  for (const std::vector<int32_t>& document : documents) {
    for (size_t begin = 0; begin + kLength <= document.size(); begin += kLength) {
      PackedBatch alone = test::packed_batch({kLength}, kVocab);
      std::copy_n(document.begin() + static_cast<int64_t>(begin), kLength, alone.tokens.begin());
      const std::vector<float> logits = test::ModelRun(Backend::kCpu, config, alone).logits();
      for (size_t i = 0; i < kLength && begin + i + 1 < document.size(); ++i) {
        double sum = 0;
        for (int64_t v = 0; v < kVocab; ++v) sum += std::exp(double{logits[i * kVocab + v]});
        sums[i] += std::log(sum) - logits[i * kVocab + document[begin + i + 1]];
        ++counts[i];
      }
    }
  }
  EXPECT_EQ(scores.tokens_L, counts);
  for (size_t i = 0; i < kLength; ++i) EXPECT_NEAR(scores.loss_sum_L[i], sums[i], 1e-4);
  EXPECT_NEAR(scores.total.loss_sum, std::accumulate(sums.begin(), sums.end(), 0.0), 1e-3);
  EXPECT_EQ(scores.total.tokens, std::accumulate(counts.begin(), counts.end(), int64_t{0}));

  const std::vector<double> bins = binned_losses(scores, 5);
  ASSERT_EQ(bins.size(), 3U);
  EXPECT_NEAR(bins[2], (sums[10] + sums[11]) / static_cast<double>(counts[10] + counts[11]), 1e-5);
}

TEST(Windows, RefusesForeignData) {
  const Numbered data({10, 5});
  EXPECT_TRUE(test::thrown_by([&] { WindowReader(data.options(14)); }).says("vocabulary of 15"));
}

}  // namespace
}  // namespace sbtrain
