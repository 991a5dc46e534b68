// What each head of a model reads of the keys.
#include "eval/reach.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "config/schema.h"
#include "model/inference/maps.h"
#include "support/model.h"
#include "unit/data/stores.h"

namespace sbtrain {
namespace {

TEST(Reach, AddsWindowsByLayerAndHead) {
  const test::TemporaryFolder folder;
  test::write_store(folder / "store.h5", test::numbered_documents({10, 25}), 35);
  HeldOutOptions options;
  options.paths = {folder / "store.h5"};
  options.vocab = 35;
  const WindowReader reader(options);
  const std::vector<Window> windows = reader.of_length(8, 1000);  // one, and three
  const auto of_batch = [](const PackedBatch& batch, int64_t max_seqlen) {
    EXPECT_EQ(batch.tokens.size(), 8U);
    EXPECT_EQ(max_seqlen, 8);
    const bool first = batch.tokens.front() == 0;
    return HeadReach{{{.read = first ? 1 : 2, .visible = 10, .beyond = {3, first ? 1 : 0}},
                      {.read = 10, .visible = 10, .beyond = {7, 6, 5}}},
                     {}};
  };
  const HeadReach reach = measure_reach(*make_single_control(), reader, windows, 8, /*layers=*/2,
                                        /*heads=*/2, of_batch);
  ASSERT_EQ(reach.size(), 2U);
  EXPECT_DOUBLE_EQ(share_read(reach[0][0]), 7.0 / 40);
  EXPECT_DOUBLE_EQ(share_read(reach[0][1]), 1);
  EXPECT_DOUBLE_EQ(share_read(all_of(reach[0])), 47.0 / 80);
  EXPECT_TRUE(std::isnan(share_read(reach[1][0])));
  EXPECT_DOUBLE_EQ(share_read(all_of(reach)), 47.0 / 80);
  EXPECT_EQ(reach[0][0].beyond[1], 1);
  EXPECT_EQ(all_of(reach[0]).beyond[0], 40);
}

// Hop h brings keys that lie h - 1 parts and more before every query of the part that gets them.
TEST(Reach, HopsThatBringKeys) {
  EXPECT_EQ(hops_needed({}, 4), 0);
  KeysRead keys{.beyond = {9, 5, 1}};  // the farthest key lies more than 2/8 back, not 3/8
  EXPECT_EQ(hops_needed(keys, 2), 1);
  EXPECT_EQ(hops_needed(keys, 4), 2);
  EXPECT_EQ(hops_needed(keys, 8), 3);
  keys.beyond.fill(1);
  EXPECT_EQ(hops_needed(keys, 4), 3);
  EXPECT_EQ(hops_needed(keys, 8), 7);
}

// The counts of heads add up to those of layers, and a head whose stick is used up at once reads
// less than one that breaks nothing off.
TEST(Reach, HeadsOfAModel) {
  ModelConfig config;
  config.layers = 2;
  config.width = 32;
  config.inner = 48;
  config.heads = 2;
  config.vocab = 40;
  config.attention = {parse_attention("{type: stickbreaking, skip_epsilon: 0.5}"),
                      parse_attention("{type: softmax}")};
  test::ModelRun run(Backend::kCpu, config, test::packed_batch({300}, 40));
  const auto by_head = keys_read_by_head(run.stream(), run.model(), run.params(), run.batch());
  const auto by_layer = keys_read(run.stream(), run.model(), run.params(), run.batch());
  ASSERT_EQ(by_head.size(), 2U);
  ASSERT_EQ(by_head[0].size(), 2U);
  EXPECT_TRUE(by_head[1].empty());
  EXPECT_EQ(by_head[0][0].visible, 300 * 299 / 2);
  EXPECT_EQ(by_head[0][1].visible, 300 * 299 / 2);
  EXPECT_EQ(all_of(by_head[0]).read, by_layer[0].read);
  EXPECT_LT(by_layer[0].read, by_layer[0].visible);
  // The first tile reads all of its keys, and no later one reads keys an eighth before it.
  EXPECT_EQ(by_head[0][0].beyond[0], 299);
  EXPECT_GT(by_head[0][0].beyond[1], 0);
  EXPECT_EQ(by_head[0][0].beyond[7], 0);
}

}  // namespace
}  // namespace sbtrain
