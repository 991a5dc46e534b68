// The kernel of a chain, emulated (emulator.h), against the kernels of its links, which have tests
// of their own: the bits are the same.
#include <gtest/gtest.h>

#include <deque>
#include <vector>

#include "kernels/chain.cu"
#include "support/tensors.h"

namespace sbtrain::emulation {
namespace {

using kernels::bf16;
using kernels::ChainLink;
using kernels::Decode;
using kernels::FewRows;
using kernels::Rope;
using kernels::SoftmaxDecode;
using kernels::StickBreakingDecode;

struct Case {
  int64_t rows;
  int heads, key_heads, head_dim;
  int64_t inner, capacity;
};

// Layers whose weights and inputs are random.
class Layers {
 public:
  Layers(const Case& c, bool softmax)
      : c_(c), width_(int64_t{c.heads} * c.head_dim), count_(1), arrived_(kernels::kDecodeBlocks) {
    const int64_t key_width = int64_t{c.key_heads} * c.head_dim;
    const int64_t qkv_width = width_ + 2 * key_width;
    bf16* const x = random(c.rows * width_);
    bf16* const h = random(c.rows * width_);
    bf16* const mix = random(c.rows * width_);
    bf16* const qkv = random(c.rows * qkv_width);
    bf16* const inner = random(c.rows * c.inner);
    for (int64_t b = 0; b < c.rows; ++b) {
      lengths_.push_back(static_cast<int32_t>(c.capacity - b * (c.capacity / c.rows)));
    }
    scratch_.resize(
        size_t(kernels::decode_scratch_floats(c.rows, c.heads, c.head_dim, c.capacity)));
    normed_.resize(static_cast<size_t>(c.rows * width_));
    for (int layer = 0; layer < 2; ++layer) {
      product({qkv, qkv_width}, {x, width_}, {}, /*norm=*/true, /*swiglu=*/false);
      const Decode t{.o = {mix, width_},
                     .q = {qkv, qkv_width},
                     .k = {qkv + width_, qkv_width},
                     .v = {qkv + width_ + key_width, qkv_width},
                     .k_cache = random(c.rows * c.capacity * key_width),
                     .v_cache = random(c.rows * c.capacity * key_width),
                     .lengths = lengths_.data(),
                     .batch = c.rows,
                     .capacity = c.capacity,
                     .heads = c.heads,
                     .key_heads = c.key_heads,
                     .head_dim = c.head_dim,
                     .scale = 0.1f,
                     .scratch = scratch_.data(),
                     .arrived = arrived_.data(),
                     .early = false};
      if (softmax) {
        Rope rope{.x = {qkv, qkv_width},
                  .positions = lengths_.data(),
                  .rows = c.rows,
                  .heads = c.heads + c.key_heads,
                  .head_dim = c.head_dim,
                  .turns = {}};
        for (int i = 0; i < c.head_dim / 2; ++i) rope.turns[i] = 0.2 / (i + 1);
        links_.push_back(rope);
        links_.push_back(SoftmaxDecode{.t = t, .window = layer == 0 ? 0 : c.capacity / 2});
      } else {
        links_.push_back(StickBreakingDecode{.t = t,
                                             .gate_cache = nullptr,
                                             .remainder_bias = nullptr,
                                             .remainder_value = layer > 0,
                                             .attend_current = layer > 0,
                                             .skip_epsilon = 0.0f});
      }
      product({h, width_}, {mix, width_}, {x, width_}, /*norm=*/false, /*swiglu=*/false);
      product({inner, c.inner}, {h, width_}, {}, /*norm=*/true, /*swiglu=*/true);
      product({x, width_}, {inner, c.inner}, {h, width_}, /*norm=*/false, /*swiglu=*/false);
    }
  }
  // All that the links write but scratch, after `run` with them.
  template <typename Run>
  std::vector<bf16> after(const Run& run) {
    const std::deque<std::vector<bf16>> before = memory_;
    run(std::span<const ChainLink>(links_), count_.data());
    std::vector<bf16> all;
    for (size_t i = 0; i < memory_.size(); ++i) {
      all.insert(all.end(), memory_[i].begin(), memory_[i].end());
      std::copy(before[i].begin(), before[i].end(), memory_[i].begin());
    }
    EXPECT_EQ(count_.front(), 0);
    return all;
  }

 private:
  bf16* random(int64_t count) {
    const test::Owned x = test::random_normal(std::to_string(memory_.size()).c_str(), {count});
    std::vector<bf16>& rounded = memory_.emplace_back();
    for (int64_t i = 0; i < count; ++i) rounded.push_back(__float2bfloat16_rn(x.f32()[i]));
    return rounded.data();
  }
  void product(kernels::Matrix<bf16> y, kernels::Matrix<bf16> x, kernels::Matrix<bf16> residual,
               bool norm, bool swiglu) {
    links_.push_back(FewRows{.type = kernels::Type::kBF16,
                             .y = {y.data, y.stride},
                             .x = {x.data, x.stride},
                             .w = {random((swiglu ? 2 : 1) * y.stride * x.stride), x.stride},
                             .residual = {residual.data, residual.stride},
                             .rows = c_.rows,
                             .n = y.stride,
                             .k = x.stride,
                             .alpha = 0.05f,
                             .early = false,
                             .norm_w = norm ? random(x.stride) : nullptr,
                             .norm_eps = 1e-2f,
                             .normed = {normed_.data(), x.stride},
                             .swiglu = swiglu});
  }

  Case c_;
  int64_t width_;
  std::deque<std::vector<bf16>> memory_;
  std::vector<int32_t> count_, arrived_, lengths_;
  std::vector<float> scratch_;
  std::vector<bf16> normed_;  // scratch
  std::vector<ChainLink> links_;
};

void one_by_one(std::span<const ChainLink> links, int32_t*) {
  for (const ChainLink& link : links) {
    if (const auto* p = std::get_if<FewRows>(&link)) kernels::few_rows(nullptr, *p);
    if (const auto* p = std::get_if<StickBreakingDecode>(&link)) {
      kernels::stickbreaking_decode(nullptr, *p);
    }
    if (const auto* p = std::get_if<SoftmaxDecode>(&link)) kernels::softmax_decode(nullptr, *p);
    if (const auto* p = std::get_if<Rope>(&link)) kernels::rope(nullptr, *p);
  }
}
void chained(std::span<const ChainLink> links, int32_t* count) {
  for (const ChainLink& link : links) EXPECT_TRUE(kernels::chain_takes(link));
  kernels::chain(nullptr, links, count);
}

// Warps without channels, and with an odd number of chunks; as many as there can be; keys of
// several parts; heads that share keys.
constexpr Case kCases[] = {
    {1, 4, 4, 64, 736, 20}, {3, 5, 1, 64, 4096, 9}, {8, 2, 2, 128, 352, 600}};

TEST(EmulatedChain, HasTheBitsOfItsLinks) {
  for (const Case& c : kCases) {
    for (const bool softmax : {false, true}) {
      Layers layers(c, softmax);
      const std::vector<bf16> expected = layers.after(one_by_one);
      const std::vector<bf16> y = layers.after(chained);
      size_t different = 0;
      for (size_t i = 0; i < y.size(); ++i) {
        different += std::memcmp(&y[i], &expected[i], sizeof(bf16)) != 0 ? 1 : 0;
      }
      EXPECT_EQ(different, 0) << c.rows << " rows of " << c.heads << " heads, softmax " << softmax;
    }
  }
}

}  // namespace
}  // namespace sbtrain::emulation
