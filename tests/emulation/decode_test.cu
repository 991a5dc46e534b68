// Attention of one new token to its cache, emulated (emulator.h), against the formulas in double
// precision.
#include <gtest/gtest.h>

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
  static double value(bf16 x) { return double{__bfloat162float(x)}; }
  size_t at(int64_t b, int64_t i) const { return size_t((b * c_.capacity + i) * width_); }

  Case c_;
  std::vector<int32_t> lengths_;
  int64_t batch_, cols_, width_;
  std::vector<bf16> q_, own_k_, own_v_, k_, v_, o_;
  std::vector<float> gate_, scratch_;
  std::vector<int32_t> arrived_;
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
