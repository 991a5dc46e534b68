// Attention of one new token to its cache, emulated (emulator.h), against the formulas in double
// precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/decode_softmax.cu"
#include "kernels/decode_stickbreaking.cu"
#include "support/tensors.h"

namespace sbtrain::emulation {
namespace {

using kernels::bf16;

struct Case {
  int heads, key_heads, head_dim;
  int64_t capacity;
};
// Channels that end within a vector; heads that share keys; several parts, by one block and by
// several: with many heads a block has a head for itself; more heads than two for each
// multiprocessor, of one part and of several; lanes without channels, of few blocks with many keys.
constexpr Case kCases[] = {{2, 2, 64, 70},   {3, 1, 5, 9},    {4, 2, 128, 300},  {1, 1, 200, 20},
                           {2, 1, 16, 1300}, {68, 4, 64, 90}, {68, 2, 16, 1100}, {1, 1, 48, 500}};

std::vector<bf16> random_bf16(const char* name, int64_t count) {
  const test::Owned x = test::random_normal(name, {count});
  std::vector<bf16> rounded;
  for (int64_t i = 0; i < count; ++i) rounded.push_back(__float2bfloat16_rn(x.f32()[i]));
  return rounded;
}

class Decode {
 public:
  static constexpr float kScale = 0.1f;

  explicit Decode(const Case& c)
      : c_(c),
        lengths_{1, 2, static_cast<int32_t>(c.capacity / 2), static_cast<int32_t>(c.capacity)},
        batch_(static_cast<int64_t>(lengths_.size())),
        cols_(int64_t{c.heads} * c.head_dim),
        width_(int64_t{c.key_heads} * c.head_dim),
        q_(random_bf16("q", batch_ * cols_)),
        own_k_(random_bf16("own k", batch_ * width_)),
        own_v_(random_bf16("own v", batch_ * width_)),
        k_(random_bf16("k", batch_ * c.capacity * width_)),
        v_(random_bf16("v", batch_ * c.capacity * width_)),
        scratch_(static_cast<size_t>(
            kernels::decode_scratch_floats(batch_, c.heads, c.head_dim, c.capacity))),
        arrived_(static_cast<size_t>(kernels::decode_blocks(kernels::multiprocessors()))) {
    for (int64_t i = 0; i < batch_ * c.capacity * c.heads; ++i) {
      gate_.push_back(1.0f - 0.01f * static_cast<float>(i % 80));
    }
    // Where the own ones go, there is nothing yet that counts.
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i < width_; ++i) {
        k_[at(b, lengths_[size_t(b)] - 1) + size_t(i)] = bf16(NAN);
        v_[at(b, lengths_[size_t(b)] - 1) + size_t(i)] = bf16(NAN);
      }
    }
  }

  kernels::Decode arguments() {
    o_.assign(q_.size(), bf16(NAN));
    return {.o = {o_.data(), cols_},
            .q = {q_.data(), cols_},
            .k = {own_k_.data(), width_},
            .v = {own_v_.data(), width_},
            .k_cache = k_.data(),
            .v_cache = v_.data(),
            .lengths = lengths_.data(),
            .batch = batch_,
            .capacity = c_.capacity,
            .heads = c_.heads,
            .key_heads = c_.key_heads,
            .head_dim = c_.head_dim,
            .scale = kScale,
            .scratch = scratch_.data(),
            .arrived = arrived_.data(),
            .early = false};
  }
  const float* gates() const { return gate_.data(); }

  // The same with the keys in pages of which each head has its own number, in no order: without
  // those whose gates are all below the bound.
  kernels::Decode kept(float bound) {
    using kernels::kPageKeys;
    const int group = c_.heads / c_.key_heads;
    const int64_t most = (c_.capacity + kPageKeys - 1) / kPageKeys;
    const int64_t all = batch_ * c_.key_heads * most;
    const int64_t page = kernels::page_bytes(c_.head_dim, sizeof(bf16), group);
    pages_.assign(static_cast<size_t>(all * page / int64_t{sizeof(uint4)}), uint4{});
    addresses_.clear();
    for (int64_t i = 0; i < all; ++i) {
      const int64_t at = (all - 1 - i) * page;
      addresses_.push_back(reinterpret_cast<int64_t>(pages_.data()) + at);
    }
    rows_.clear();
    for (int64_t b = 0; b < batch_; ++b) {
      for (int g = 0; g < c_.key_heads; ++g) rows_.push_back(fill(b, g, most, bound));
    }
    kernels::Decode t = arguments();
    t.k_cache = t.v_cache = nullptr;
    t.lengths = rows_.data();
    t.capacity = most * kPageKeys;
    t.pages = {addresses_.data(), c_.key_heads * most, most};
    scratch_.resize(static_cast<size_t>(
        kernels::decode_scratch_floats(batch_, c_.heads, c_.head_dim, t.capacity)));
    t.scratch = scratch_.data();
    return t;
  }
  // Gates of 0 for keys that kept() leaves out, which hide them.
  void hide(float bound) {
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t i = 0; i + 1 < lengths_[size_t(b)]; ++i) {
        for (int g = 0; g < c_.key_heads; ++g) {
          if (keeps(b, i, g, bound)) continue;
          const int group = c_.heads / c_.key_heads;
          for (int n = 0; n < group; ++n) gate_[gate_at(b, i) + size_t(g * group + n)] = 0;
        }
      }
    }
  }
  std::vector<double> output() const {
    std::vector<double> y;
    for (const bf16 x : o_) y.push_back(value(x));
    return y;
  }

  // weights(b, h, logits of the keys) gives the weight of each key, which may be fewer.
  template <typename Weights>
  void expect(const Weights& weights) const {
    std::vector<double> expected;
    std::vector<double> actual;
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t length = lengths_[size_t(b)];
      for (int h = 0; h < c_.heads; ++h) {
        const int64_t column = int64_t{h / (c_.heads / c_.key_heads)} * c_.head_dim;
        std::vector<double> logits;
        for (int64_t i = 0; i < length; ++i) {
          double z = 0;
          for (int c = 0; c < c_.head_dim; ++c) {
            z += value(q_[size_t(b * cols_ + h * c_.head_dim + c)]) *
                 value(k_[at(b, i) + size_t(column + c)]);
          }
          logits.push_back(double(kScale) * z);
        }
        const std::vector<double> w = weights(b, h, logits);
        for (int c = 0; c < c_.head_dim; ++c) {
          double y = 0;
          for (size_t i = 0; i < w.size(); ++i) {
            y += w[i] * value(v_[at(b, int64_t(i)) + size_t(column + c)]);
          }
          expected.push_back(y);
          actual.push_back(value(o_[size_t(b * cols_ + h * c_.head_dim + c)]));
        }
      }
    }
    EXPECT_LE(test::relative_error(actual, expected), 4e-3)
        << c_.heads << " heads of " << c_.head_dim << ", capacity " << c_.capacity;
    for (const int32_t count : arrived_) EXPECT_EQ(count, 0);
  }
  double gate(int64_t b, int64_t i, int h) const {
    return double{gate_[size_t((b * c_.capacity + i) * c_.heads + h)]};
  }

 private:
  size_t gate_at(int64_t b, int64_t i) const { return size_t((b * c_.capacity + i) * c_.heads); }
  bool keeps(int64_t b, int64_t i, int g, float bound) const {
    const int group = c_.heads / c_.key_heads;
    const auto first = gate_.begin() + static_cast<ptrdiff_t>(gate_at(b, i)) + g * group;
    return *std::max_element(first, first + group) >= bound;
  }
  // Returns the rows of a head, the token's own among them.
  int32_t fill(int64_t b, int g, int64_t most, float bound) {
    const int group = c_.heads / c_.key_heads;
    const int64_t d = c_.head_dim;
    const int64_t length = lengths_[size_t(b)];
    int32_t row = 0;
    for (int64_t i = 0; i < length; ++i) {
      if (i + 1 < length && !keeps(b, i, g, bound)) continue;
      const int64_t page = addresses_[size_t((b * c_.key_heads + g) * most + row / 64)];
      auto* const rows = reinterpret_cast<bf16*>(page);
      const int64_t at_row = row % 64;
      std::copy_n(k_.begin() + ptrdiff_t(at(b, i)) + g * d, d, rows + at_row * d);
      std::copy_n(v_.begin() + ptrdiff_t(at(b, i)) + g * d, d, rows + (64 + at_row) * d);
      std::copy_n(gate_.begin() + ptrdiff_t(gate_at(b, i)) + g * group, group,
                  reinterpret_cast<float*>(rows + 128 * d) + at_row * group);
      ++row;
    }
    return row;
  }
  static double value(bf16 x) { return double{__bfloat162float(x)}; }
  size_t at(int64_t b, int64_t i) const { return size_t((b * c_.capacity + i) * width_); }

  Case c_;
  std::vector<int32_t> lengths_;
  int64_t batch_, cols_, width_;
  std::vector<bf16> q_, own_k_, own_v_, k_, v_, o_;
  std::vector<float> gate_, scratch_;
  std::vector<int32_t> arrived_;
  std::vector<uint4> pages_;
  std::vector<int64_t> addresses_;
  std::vector<int32_t> rows_;
};

TEST(EmulatedDecode, StickBreaking) {
  for (const Case& c : kCases) {
    for (const auto& [gated, skip_epsilon] :
         {std::pair{false, 0.0f}, {true, 0.0f}, {false, 1e-5f}}) {
      const bool current = !gated;
      Decode t(c);
      kernels::stickbreaking_decode(nullptr, {.t = t.arguments(),
                                              .gate_cache = gated ? t.gates() : nullptr,
                                              .remainder_bias = nullptr,
                                              .remainder_value = true,
                                              .attend_current = current,
                                              .skip_epsilon = skip_epsilon});
      t.expect([&](int64_t b, int h, const std::vector<double>& logits) {
        std::vector<double> w(logits.size());
        double stick = 1;
        for (size_t i = logits.size() - (current ? 0 : 1); i-- > 0;) {
          const double gate = gated ? t.gate(b, int64_t(i), h) : 1.0;
          const double beta = gate / (1 + std::exp(-logits[i]));
          w[i] = stick * beta;
          stick *= 1 - beta;
        }
        w.back() += stick;
        return w;
      });
    }
  }
}

// With all keys in pages, outputs have the bits of keys at even distances; without those that are
// dropped, they are those of hidden keys.
TEST(EmulatedDecode, StickBreakingInPages) {
  for (const Case& c : kCases) {
    for (const bool current : {false, true}) {
      for (const float bound : {0.0f, 0.6f, 0.99f}) {
        const auto output = [&](bool paged) {
          Decode t(c);
          if (!paged) t.hide(bound);
          kernels::stickbreaking_decode(nullptr, {.t = paged ? t.kept(bound) : t.arguments(),
                                                  .gate_cache = paged ? nullptr : t.gates(),
                                                  .remainder_bias = nullptr,
                                                  .remainder_value = true,
                                                  .attend_current = current,
                                                  .skip_epsilon = 0.0f});
          return t.output();
        };
        const std::vector<double> kept = output(true), hidden = output(false);
        if (bound == 0.0f) {
          EXPECT_EQ(kept, hidden) << c.heads << " heads of " << c.head_dim;
        }
        EXPECT_LE(test::relative_error(kept, hidden), 4e-3)
            << c.heads << " heads of " << c.head_dim << ", bound " << bound;
      }
    }
  }
}

TEST(EmulatedDecode, Softmax) {
  for (const Case& c : kCases) {
    for (const int64_t window : {0, 5}) {
      Decode t(c);
      kernels::softmax_decode(nullptr, {.t = t.arguments(), .window = window});
      t.expect([&](int64_t, int, const std::vector<double>& logits) {
        std::vector<double> w(logits.size());
        double sum = 0;
        const size_t first =
            window > 0 ? logits.size() - std::min(logits.size(), size_t(window)) : 0;
        for (size_t i = first; i < w.size(); ++i) sum += w[i] = std::exp(logits[i]);
        for (double& x : w) x /= sum;
        return w;
      });
    }
  }
}

}  // namespace
}  // namespace sbtrain::emulation
