// Keys that are dropped by their gates: where the others lie, what a query finds of them, and how
// much an output changes.
#include "ops/kept_keys.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/map.h"
#include "core/error.h"
#include "unit/attention/cases.h"

namespace sbtrain::test::kept_keys {
namespace {

float element(const Owned& x, int64_t row, int64_t col) {
  return x.f32()[row * x.tensor().row_stride + col];
}

// Gates from 0 to 1, of which none is that small for a bound of 0.001.
float gate_of(int64_t i) {
  const Philox random(1, RandomPurpose::kTest, "gates to drop");
  return 0.001f + 0.998f * static_cast<float>(random.uniform(static_cast<uint64_t>(i)));
}

struct Sizes {
  int heads, group;
  int64_t head_dim, tokens;
  int key_heads() const { return heads / group; }
  int64_t key_width() const { return key_heads() * head_dim; }
};
constexpr Sizes kSizes[] = {{3, 1, 5, 7}, {4, 2, 16, 200}, {4, 4, 8, 64}, {2, 1, 12, 65}};

// A sequence's keys, all of them and those that are kept, in pages that follow no order.
class Sequence {
 public:
  Sequence(CpuStream& s, const Sizes& sizes, float bound)
      : sizes(sizes),
        qkv(random_normal("qkv",
                          {sizes.tokens, sizes.heads * sizes.head_dim + 2 * sizes.key_width()})),
        gate(generated({sizes.tokens, sizes.heads}, 0, gate_of)),
        rows(poisoned_integers({sizes.key_heads(), sizes.tokens})),
        counts(poisoned_integers({sizes.key_heads()})),
        most((sizes.tokens + ops::kPageKeys) / ops::kPageKeys),
        page(kernels::page_bytes(sizes.head_dim, sizeof(float), sizes.group) /
             int64_t{sizeof(float)}),
        memory(poisoned({sizes.key_heads() * most, page})),
        addresses(static_cast<size_t>(sizes.key_heads() * most)),
        pages(addresses.data(), DType::kI64, {1, sizes.key_heads(), most}) {
    for (size_t i = 0; i < addresses.size(); ++i) {
      const auto at = static_cast<int64_t>(addresses.size() - 1 - i);
      addresses[i] = reinterpret_cast<int64_t>(memory.f32() + at * page);
    }
    ops::run(s,
             ops::KeepKeys{.rows_GT = rows, .counts_G = counts, .gate_TH = gate, .bound = bound});
    ops::run(s,
             ops::StoreKeys{
                 .pages_1GM = pages, .rows_GT = rows, .k_TGd = k(), .v_TGd = v(), .gate_TH = gate});
  }
  Tensor q() const { return qkv.tensor().col_range(0, sizes.heads * sizes.head_dim); }
  Tensor k() const { return qkv.tensor().col_range(q().cols(), sizes.key_width()); }
  Tensor v() const { return qkv.tensor().col_range(q().cols() + k().cols(), sizes.key_width()); }
  bool dropped(int64_t t, int g, float bound) const {
    bool below = true;
    for (int i = 0; i < sizes.group; ++i)
      below = below && element(gate, t, g * sizes.group + i) < bound;
    return below;
  }
  const float* page_of(int g, int64_t row) const {
    const int64_t address = addresses[static_cast<size_t>(g * most + row / ops::kPageKeys)];
    return reinterpret_cast<const float*>(address);
  }

  Sizes sizes;
  Owned qkv, gate, rows, counts;
  int64_t most, page;  // pages of a head, floats of a page
  Owned memory;
  std::vector<int64_t> addresses;
  Tensor pages;

 private:
  static Owned poisoned_integers(std::vector<int64_t> shape) {
    Owned x(DType::kI32, std::move(shape));
    std::memset(x.tensor().data, 0x7f, x.tensor().bytes());
    return x;
  }
};

TEST(KeptKeys, LieInTheOrderOfTheirTokens) {
  for (const Sizes& sizes : kSizes) {
    for (const float bound : {0.0f, 0.3f, 0.7f, 1.1f}) {
      CpuStream s;
      const Sequence x(s, sizes, bound);
      for (int g = 0; g < sizes.key_heads(); ++g) {
        int32_t row = 0;
        for (int64_t t = 0; t < sizes.tokens; ++t) {
          if (x.dropped(t, g, bound)) {
            EXPECT_EQ(x.rows.i32()[g * sizes.tokens + t], -1);
            continue;
          }
          EXPECT_EQ(x.rows.i32()[g * sizes.tokens + t], row);
          const float* page = x.page_of(g, row);
          const int64_t at = row % ops::kPageKeys;
          for (int64_t c = 0; c < sizes.head_dim; ++c) {
            EXPECT_EQ(page[at * sizes.head_dim + c],
                      element(x.qkv, t, x.q().cols() + g * sizes.head_dim + c));
          }
          EXPECT_EQ(page[2 * ops::kPageKeys * sizes.head_dim + at * sizes.group],
                    element(x.gate, t, g * sizes.group));
          ++row;
        }
        EXPECT_EQ(x.counts.i32()[g], row);
      }
    }
  }
}

// One step more after a sequence: its output where all keys are cached, and where some are dropped.
struct Step {
  Step(const Sizes& sizes, const ops::StickBreakingParams& params)
      : sizes(sizes),
        params(params),
        q(random_normal("new q", {1, sizes.heads * sizes.head_dim})),
        k(random_normal("new k", {1, sizes.key_width()})),
        v(random_normal("new v", {1, sizes.key_width()})),
        gate(generated({1, sizes.heads}, 0, [](int64_t i) { return gate_of(1000 + i); })),
        bias(random_normal("bias", {sizes.heads * sizes.head_dim})),
        o(poisoned({1, sizes.heads * sizes.head_dim})) {}

  // With gates of 0 for what is below the bound, which hide a key.
  std::vector<double> with_all(CpuStream& s, const Sequence& x, float bound) const {
    const int64_t tokens = sizes.tokens;
    const Owned k_cache = poisoned({1, tokens + 1, sizes.key_width()});
    const Owned v_cache = poisoned({1, tokens + 1, sizes.key_width()});
    const Owned gates = poisoned({1, tokens + 1, sizes.heads});
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < sizes.key_width(); ++c) {
        k_cache.f32()[t * sizes.key_width() + c] = x.k().f32()[t * x.k().row_stride + c];
        v_cache.f32()[t * sizes.key_width() + c] = x.v().f32()[t * x.v().row_stride + c];
      }
      for (int h = 0; h < sizes.heads; ++h) {
        const bool hidden = x.dropped(t, h / sizes.group, bound);
        gates.f32()[t * sizes.heads + h] = hidden ? 0.0f : element(x.gate, t, h);
      }
    }
    std::copy_n(gate.f32(), sizes.heads, gates.f32() + tokens * sizes.heads);
    ops::run(s, ops::StickBreakingDecode{.o_BHd = o,
                                         .q_BHd = q,
                                         .k_BGd = k,
                                         .v_BGd = v,
                                         .k_cache_BCGd = k_cache,
                                         .v_cache_BCGd = v_cache,
                                         .gate_cache_BCH = gates,
                                         .remainder_bias_Hd = bias,
                                         .lengths_B = integers({static_cast<int32_t>(tokens + 1)}),
                                         .params = params});
    return to_f64(o);
  }
  std::vector<double> with_kept(CpuStream& s, Sequence& x, float bound) const {
    const Owned lengths = integers(std::vector<int32_t>(sizes.key_heads()));
    const Tensor counts = x.counts.tensor().reshaped({1, sizes.key_heads()});
    const std::vector<int32_t> before(x.counts.i32(), x.counts.i32() + sizes.key_heads());
    ops::run(s, ops::PlaceKeys{.counts_BG = counts,
                               .lengths_BG = lengths,
                               .pages_BGM = x.pages,
                               .gate_BH = gate,
                               .positions_B = integers({static_cast<int32_t>(sizes.tokens)}),
                               .bound = bound,
                               .head_dim = static_cast<int>(sizes.head_dim)});
    for (int g = 0; g < sizes.key_heads(); ++g) {
      const float* of_head = gate.f32() + g * sizes.group;
      const bool kept = *std::max_element(of_head, of_head + sizes.group) >= bound;
      EXPECT_EQ(lengths.i32()[g], before[g] + 1);
      EXPECT_EQ(x.counts.i32()[g], before[g] + (kept ? 1 : 0));
    }
    ops::run(s, ops::StickBreakingKeptDecode{.o_BHd = o,
                                             .q_BHd = q,
                                             .k_BGd = k,
                                             .v_BGd = v,
                                             .pages_BGM = x.pages,
                                             .remainder_bias_Hd = bias,
                                             .lengths_BG = lengths,
                                             .params = params});
    return to_f64(o);
  }

  Sizes sizes;
  ops::StickBreakingParams params;
  Owned q, k, v, gate, bias, o;
};

template <typename Visit>
void for_each_step(const Visit& visit) {
  for (const Sizes& sizes : kSizes) {
    for (const bool current : {false, true}) {
      for (const auto remainder :
           {ops::Remainder::kNone, ops::Remainder::kValue, ops::Remainder::kBias}) {
        for (const float skip : {0.0f, 1e-3f}) {
          visit(Step(sizes, {.heads = sizes.heads,
                             .scale = 0.4f,
                             .attend_current = current,
                             .remainder = remainder,
                             .skip_epsilon = skip}));
        }
      }
    }
  }
}

TEST(KeptKeys, NothingIsDroppedWithTheBitsOfOtherCaches) {
  for_each_step([](const Step& step) {
    CpuStream s;
    Sequence x(s, step.sizes, 0.0005f);
    EXPECT_EQ(x.counts.i32()[0], step.sizes.tokens);
    EXPECT_EQ(step.with_kept(s, x, 0.0005f), step.with_all(s, x, 0.0005f));
  });
}

TEST(KeptKeys, AreAllThatAQuerySees) {
  for_each_step([](const Step& step) {
    if (step.params.skip_epsilon > 0) return;  // sticks are looked at after other keys
    for (const float bound : {0.3f, 0.7f, 1.1f}) {
      CpuStream s;
      Sequence x(s, step.sizes, bound);
      const std::vector<double> expected = step.with_all(s, x, bound);
      EXPECT_LE(relative_error(step.with_kept(s, x, bound), expected), 2e-6) << bound;
    }
  });
}

// A token at position 0 begins a sequence, whatever the counts were.
TEST(KeptKeys, ANewSequenceBeginsWithItsFirstToken) {
  CpuStream s;
  const Step step(kSizes[0], {.heads = 3, .scale = 0.4f, .attend_current = true});
  Sequence x(s, step.sizes, 0.3f);
  const Owned lengths = integers({9, 9, 9});
  ops::run(s, ops::PlaceKeys{.counts_BG = x.counts.tensor().reshaped({1, 3}),
                             .lengths_BG = lengths,
                             .pages_BGM = x.pages,
                             .gate_BH = step.gate,
                             .positions_B = integers({0}),
                             .bound = 2.0f,
                             .head_dim = 5});
  for (int g = 0; g < 3; ++g) {
    EXPECT_EQ(lengths.i32()[g], 1);
    EXPECT_EQ(x.counts.i32()[g], 0);
  }
}

TEST(KeptKeys, RowsBeyondThePagesAreRefused) {
  CpuStream s;
  const Step step(kSizes[0], {.heads = 3, .scale = 0.4f});
  Sequence x(s, step.sizes, 0.0f);
  x.counts.i32()[1] = static_cast<int32_t>(x.most * ops::kPageKeys);
  EXPECT_THROW(step.with_kept(s, x, 0.0f), Error);
}

HostMatrix random_matrix(const char* name, int64_t rows, int64_t cols) {
  HostMatrix x(rows, cols);
  const Philox random(7, RandomPurpose::kTest, name);
  for (size_t i = 0; i < x.values.size(); ++i)
    x.values[i] = random.normal(static_cast<uint64_t>(i));
  return x;
}

// In double precision: with D the keys that were dropped, an output changes by at most the largest
// distance of two values, the remainder's among them, times the weight of D, which is at most
// 1 - prod over D of (1 - f); the weights change by exactly the weight of D (total variation).
TEST(KeptKeys, ChangeAnOutputByLessThanTheBound) {
  constexpr int64_t kTokens = 120, kDim = 6;
  for (const bool with_bias : {false, true}) {
    for (const double bound : {0.001, 0.01, 0.1, 0.5}) {
      const HostMatrix q = random_matrix("q", kTokens, kDim);
      const HostMatrix k = random_matrix("k", kTokens, kDim);
      const HostMatrix v = random_matrix("v", kTokens + 1, kDim);  // the last one: the remainder's
      HostMatrix gate(kTokens, 1), kept(kTokens, 1);
      const Philox random(3, RandomPurpose::kTest, "gates");
      for (int64_t i = 0; i < kTokens; ++i) {
        // Small ones and large ones.
        *gate.row(i) = std::pow(random.uniform(static_cast<uint64_t>(i)), 6.0);
        *kept.row(i) = *gate.row(i) < bound ? 0.0 : *gate.row(i);
      }
      const ops::StickBreakingParams params = {.heads = 1, .scale = 0.4f};
      const FillWeights all = stickbreaking_weights(q, k, gate, params);
      const FillWeights hidden = stickbreaking_weights(q, k, kept, params);
      double largest = 0;
      for (int64_t j = 1; j < kTokens; ++j) {
        std::vector<double> a(kTokens + 1), b(kTokens + 1);
        a[kTokens] = all(j, a);
        b[kTokens] = hidden(j, b);
        double of_dropped = 0, none = 1, variation = 0, diameter = 0;
        for (int64_t i = 0; i <= kTokens; ++i) {
          variation += std::abs(a[i] - b[i]) / 2;
          if (i >= j || *kept.row(i) > 0) continue;
          of_dropped += a[i];
          none *= 1 - *gate.row(i);
        }
        EXPECT_NEAR(variation, of_dropped, 1e-12);
        EXPECT_LE(of_dropped, 1 - none + 1e-12);
        const auto value = [&](int64_t i, int64_t c) {
          return i == kTokens && !with_bias ? 0.0 : v.row(i)[c];
        };
        double change = 0;
        for (int64_t c = 0; c < kDim; ++c) {
          double sum = 0;
          for (int64_t i = 0; i <= kTokens; ++i) sum += (a[i] - b[i]) * value(i, c);
          change += sum * sum;
        }
        for (int64_t i = 0; i <= kTokens; ++i) {
          for (int64_t n = 0; n < i; ++n) {
            if ((i >= j && i < kTokens) || n >= j) continue;
            double distance = 0;
            for (int64_t c = 0; c < kDim; ++c) distance += std::pow(value(i, c) - value(n, c), 2);
            diameter = std::max(diameter, std::sqrt(distance));
          }
        }
        EXPECT_LE(std::sqrt(change), diameter * of_dropped + 1e-12) << j;
        largest = std::max(largest, std::sqrt(change) / (diameter * (1 - none)));
      }
      EXPECT_GT(largest, 0.02) << "the bound is far from what happens";
    }
  }
}

}  // namespace
}  // namespace sbtrain::test::kept_keys
