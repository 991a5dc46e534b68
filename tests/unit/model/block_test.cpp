#include "model/block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "config/schema.h"
#include "core/context_share.h"
#include "support/attention_module.h"

namespace sbtrain::test {
namespace {

// The second of two ranks that share a row. What comes from the first one is what this one sends.
class SecondRank : public ContextRanks {
 public:
  int place() const override { return 1; }
  int size() const override { return 2; }
  Event start_shift(Stream& s, const Buffer& to, const Buffer& from, int /*step*/) override {
    if (on_shift) on_shift();
    s.copy_bytes(to.tensor().data, from.tensor().data, from.tensor().bytes());
    return {};
  }
  Event start_sum(Stream& /*s*/, const Buffer& /*part*/, const Buffer& /*parts*/) override {
    fail(ExitCode::kInternal, "consecutive parts have no sums");
  }
  void await(Stream& /*s*/, const Event& /*started*/) override {}

  std::function<void()> on_shift;
};

bool all_zero(const Parameters& gradients) {
  return std::ranges::all_of(gradients.storage, [](float x) { return x == 0.0f; });
}

// Attention waits for keys of other ranks before it can compute anything, so they travel beside the
// backward pass of the MLP.
TEST(Block, AsksOtherRanksForKeysBeforeTheBackwardPassOfItsMlp) {
  const Pack pack({24});
  ModelConfig config;
  config.width = 16;
  config.heads = 2;
  config.inner = 24;
  for (const std::string type : {"stickbreaking", "softmax", "coca"}) {
    SCOPED_TRACE(type);
    const Block block(config, parse_attention("{type: " + type + "}"), Recompute::kNone);
    SecondRank ranks;
    const ContextShare share{.ranks = &ranks,
                             .tokens = pack.tokens,
                             .chunks = {{.place = 1,
                                         .continued = pack.tokens,
                                         .earlier = pack.tokens,
                                         .documents = pack.sequences()}}};
    Sequences sequences = pack.sequences();
    sequences.max_seqlen *= ranks.size();
    sequences.context = &share;
    const Parameters w(block.parameters(), true);
    Parameters dw(block.parameters(), false);
    const Owned x = random_normal("x", {pack.tokens, config.width});
    const Owned y = poisoned({pack.tokens, config.width});
    const Owned dx = random_normal("dy", {pack.tokens, config.width});
    CpuStream s;
    BlockSaved saved;
    block.forward(s, y, x, w.weights, saved, sequences);
    std::vector<bool> nothing_computed;
    ranks.on_shift = [&] { nothing_computed.push_back(all_zero(dw)); };
    block.backward(s, {.x_TD = dx}, x, w.weights, dw.weights, saved, sequences);
    ASSERT_EQ(nothing_computed.size(), 2U);  // keys, and their gradients on the way home
    EXPECT_TRUE(nothing_computed[0]);
    EXPECT_FALSE(nothing_computed[1]);
  }
}

}  // namespace
}  // namespace sbtrain::test
