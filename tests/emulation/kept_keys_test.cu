// How keys that are kept come to their rows, emulated (emulator.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/kept_keys.cu"
#include "support/tensors.h"

namespace sbtrain::emulation {
namespace {

using kernels::bf16;
using kernels::kPageKeys;

struct Case {
  int heads, key_heads, head_dim;
  int64_t tokens;
};
// Fewer tokens than threads that sort them out, and more; channels that vectors do not divide.
constexpr Case kCases[] = {{2, 2, 64, 70}, {3, 1, 5, 9}, {4, 2, 16, 2500}, {2, 1, 12, 1024}};

class Kept {
 public:
  explicit Kept(const Case& c)
      : c_(c),
        group_(c.heads / c.key_heads),
        most_(c.tokens / kPageKeys + 1),
        page_(kernels::page_bytes(c.head_dim, sizeof(bf16), group_)),
        memory_(static_cast<size_t>(c.key_heads * most_ * page_ / int64_t{sizeof(uint4)})),
        rows_(static_cast<size_t>(c.key_heads * c.tokens), 9),
        counts_(static_cast<size_t>(c.key_heads), 9) {
    const test::Owned x = test::random_normal("k and v", {2 * c.tokens * width()});
    for (int64_t i = 0; i < 2 * c.tokens * width(); ++i) {
      kv_.push_back(__float2bfloat16_rn(x.f32()[i]));
    }
    for (int64_t i = 0; i < c.tokens * c.heads; ++i) {
      gate_.push_back(static_cast<float>(i * 7919 % 1000) / 1000.0f);
    }
    for (int64_t i = c.key_heads * most_; i-- > 0;) {
      addresses_.push_back(reinterpret_cast<int64_t>(memory_.data()) + i * page_);
    }
  }
  int64_t width() const { return int64_t{c_.key_heads} * c_.head_dim; }
  kernels::KeyPages pages() const { return {addresses_.data(), c_.key_heads * most_, most_}; }
  void store(float bound) {
    launch(nullptr, kernels::KeepKeys{rows_.data(),
                                      counts_.data(),
                                      {gate_.data(), c_.heads},
                                      bound,
                                      c_.tokens,
                                      c_.heads,
                                      c_.key_heads});
    launch(nullptr, kernels::StoreKeys{pages(),
                                       rows_.data(),
                                       {kv_.data(), 2 * width()},
                                       {kv_.data() + width(), 2 * width()},
                                       {gate_.data(), c_.heads},
                                       c_.tokens,
                                       c_.heads,
                                       c_.key_heads,
                                       c_.head_dim});
  }
  bool keeps(int64_t t, int g, float bound) const {
    const float* const gates = gate_.data() + t * c_.heads + g * group_;
    return *std::max_element(gates, gates + group_) >= bound;
  }
  void expect_rows(float bound) const {
    for (int g = 0; g < c_.key_heads; ++g) {
      int32_t row = 0;
      for (int64_t t = 0; t < c_.tokens; ++t) {
        const int32_t found = rows_[size_t(g * c_.tokens + t)];
        if (!keeps(t, g, bound)) {
          ASSERT_EQ(found, -1) << t;
          continue;
        }
        ASSERT_EQ(found, row) << t;
        const auto* const page = page_of_row(g, row);
        const int64_t at = row % kPageKeys;
        for (int64_t c = 0; c < c_.head_dim; ++c) {
          const size_t from = size_t(t * 2 * width() + g * c_.head_dim + c);
          ASSERT_EQ(value(page[at * c_.head_dim + c]), value(kv_[from]));
          ASSERT_EQ(value(page[(kPageKeys + at) * c_.head_dim + c]),
                    value(kv_[from + size_t(width())]));
        }
        for (int i = 0; i < group_; ++i) {
          ASSERT_EQ(gates(page)[at * group_ + i], gate_[size_t(t * c_.heads + g * group_ + i)]);
        }
        ++row;
      }
      EXPECT_EQ(counts_[size_t(g)], row);
    }
  }
  // A token more, whose gates are those of token 3: at the position after the others, or the first.
  void expect_placed(float bound, bool first) {
    const std::vector<int32_t> before = counts_;
    std::vector<int32_t> lengths(counts_.size(), -1);
    const int32_t position = first ? 0 : static_cast<int32_t>(c_.tokens);
    launch(nullptr, kernels::PlaceKeys{pages(),
                                       {counts_.data(), c_.key_heads},
                                       lengths.data(),
                                       {gate_.data() + 3 * c_.heads, c_.heads},
                                       &position,
                                       bound,
                                       1,
                                       c_.heads,
                                       c_.key_heads,
                                       c_.head_dim});
    for (int g = 0; g < c_.key_heads; ++g) {
      const int32_t row = first ? 0 : before[size_t(g)];
      EXPECT_EQ(lengths[size_t(g)], row + 1);
      EXPECT_EQ(counts_[size_t(g)], row + (keeps(3, g, bound) ? 1 : 0));
      for (int i = 0; i < group_; ++i) {
        EXPECT_EQ(gates(page_of_row(g, row))[row % kPageKeys * group_ + i],
                  gate_[size_t(3 * c_.heads + g * group_ + i)]);
      }
    }
  }

 private:
  static double value(bf16 x) { return double{__bfloat162float(x)}; }
  const bf16* page_of_row(int g, int32_t row) const {
    return reinterpret_cast<const bf16*>(addresses_[size_t(g * most_ + row / kPageKeys)]);
  }
  const float* gates(const bf16* page) const {
    return reinterpret_cast<const float*>(page + 2 * kPageKeys * c_.head_dim);
  }
  Case c_;
  int group_;
  int64_t most_, page_;
  std::vector<uint4> memory_;
  std::vector<int64_t> addresses_;
  std::vector<bf16> kv_;
  std::vector<float> gate_;
  std::vector<int32_t> rows_, counts_;
};

TEST(EmulatedKeptKeys, ComeToTheirRows) {
  for (const Case& c : kCases) {
    for (const float bound : {0.0f, 0.4f, 0.9f, 2.0f}) {
      SCOPED_TRACE(testing::Message() << c.tokens << " tokens, bound " << bound);
      Kept kept(c);
      kept.store(bound);
      kept.expect_rows(bound);
      kept.expect_placed(bound, /*first=*/false);
      kept.expect_placed(bound, /*first=*/true);
    }
  }
}

}  // namespace
}  // namespace sbtrain::emulation
