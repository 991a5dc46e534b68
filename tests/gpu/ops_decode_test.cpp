#include <gtest/gtest.h>

#include "gpu/op_test.h"
#include "ops/attention.h"

namespace sbtrain::decode_test {
namespace {

using test::OnGpu;
using test::Owned;
using Decode = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;

TEST_F(Decode, CacheAppendWritesOneRowEach) {
  for (const auto& [cols, gap] : {std::pair{5, 0}, {64, 8}, {64, 3}}) {
    const Owned cache = test::random_bf16("cache", {3, 7, cols});
    const Owned x = test::random_bf16("x", {3, cols});
    const Owned positions = test::integers({6, 0, 3});
    const OnGpu cache_gpu(gpu(), cache, kBF16);
    ops::run(gpu(), ops::CacheAppend{.cache_BCN = cache_gpu,
                                     .x_BN = OnGpu(gpu(), x, kBF16, gap),
                                     .positions_B = OnGpu(gpu(), positions, kI32)});
    const OnGpu cache_f32(gpu(), cache, kF32);
    ops::run(gpu(), ops::CacheAppend{.cache_BCN = cache_f32,
                                     .x_BN = OnGpu(gpu(), x, kF32, gap),
                                     .positions_B = OnGpu(gpu(), positions, kI32)});
    ops::run(cpu, ops::CacheAppend{.cache_BCN = cache, .x_BN = x, .positions_B = positions});
    EXPECT_EQ(cache_gpu.values(), test::to_f64(cache));
    EXPECT_EQ(cache_f32.values(), test::to_f64(cache));
  }
}

// Sequences of every length up to the capacity, on the host and on the GPU.
struct Case {
  int heads;
  int64_t head_dim, capacity, gap;
  int key_heads;
};
constexpr Case kCases[] = {{3, 5, 9, 1, 3},       {2, 64, 70, 0, 2},    {24, 64, 700, 8, 24},
                           {2, 128, 300, 0, 2},   {3, 200, 33, 0, 3},   {1, 256, 20, 0, 1},
                           {24, 64, 700, 8, 12},  {8, 64, 70, 0, 2},    {8, 128, 70, 0, 1},
                           {32, 32, 1100, 0, 32}, {2, 128, 2500, 0, 1}, {130, 16, 600, 0, 130},
                           {2, 48, 500, 0, 2}};

class Tensors {
 public:
  Tensors(test::GpuStream& s, const Case& c)
      : lengths_(test::integers(lengths_of(c))),
        batch_(lengths_.tensor().numel()),
        cols_(c.heads * c.head_dim),
        key_cols_(c.key_heads * c.head_dim),
        q_(test::random_bf16("q", {batch_, cols_})),
        k_(test::random_bf16("k", {batch_, c.capacity, key_cols_})),
        v_(test::random_bf16("v", {batch_, c.capacity, key_cols_})),
        gate_(test::generated({batch_, c.capacity, c.heads}, 0,
                              [](int64_t i) { return 1.0f - 0.01f * static_cast<float>(i % 80); })),
        bias_(test::random_bf16("bias", {cols_})),
        expected_(test::poisoned({batch_, cols_})),
        o_gpu_(s, kBF16, {batch_, cols_}, c.gap),
        q_gpu_(s, q_, kBF16, c.gap),
        k_gpu_(s, k_, kBF16),
        v_gpu_(s, v_, kBF16),
        gate_gpu_(s, gate_, kF32),
        bias_gpu_(s, bias_, kBF16),
        lengths_gpu_(s, lengths_, kI32) {}

  ops::StickBreakingDecode host(bool gate) const {
    return {.o_BHd = expected_,
            .q_BHd = q_,
            .k_cache_BCGd = k_,
            .v_cache_BCGd = v_,
            .gate_cache_BCH = gate ? gate_.tensor() : Tensor{},
            .remainder_bias_Hd = bias_,
            .lengths_B = lengths_,
            .params = {}};
  }
  ops::StickBreakingDecode device(bool gate) const {
    return {.o_BHd = o_gpu_,
            .q_BHd = q_gpu_,
            .k_cache_BCGd = k_gpu_,
            .v_cache_BCGd = v_gpu_,
            .gate_cache_BCH = gate ? gate_gpu_.tensor() : Tensor{},
            .remainder_bias_Hd = bias_gpu_,
            .lengths_B = lengths_gpu_,
            .params = {}};
  }
  double error() const { return test::relative_error(o_gpu_, expected_); }
  bool gaps_intact() const { return o_gpu_.gaps_intact(); }

 private:
  static std::vector<int32_t> lengths_of(const Case& c) {
    const auto capacity = static_cast<int32_t>(c.capacity);
    return {1, 2, capacity / 2, capacity - 1, capacity};
  }
  Owned lengths_;
  int64_t batch_, cols_, key_cols_;
  Owned q_, k_, v_, gate_, bias_, expected_;
  OnGpu o_gpu_, q_gpu_, k_gpu_, v_gpu_, gate_gpu_, bias_gpu_, lengths_gpu_;
};

ops::SoftmaxDecode softmax(const ops::StickBreakingDecode& t, const ops::SoftmaxParams& params) {
  return {.o_BHd = t.o_BHd,
          .q_BHd = t.q_BHd,
          .k_cache_BCGd = t.k_cache_BCGd,
          .v_cache_BCGd = t.v_cache_BCGd,
          .lengths_B = t.lengths_B,
          .params = params};
}

ops::StickBreakingDecode stickbreaking(ops::StickBreakingDecode t,
                                       const ops::StickBreakingParams& params) {
  t.params = params;
  return t;
}

TEST_F(Decode, SoftmaxMatchesTheCpu) {
  for (const Case& c : kCases) {
    const Tensors t(gpu(), c);
    for (const int64_t window : {0, 1, 5, 1000}) {
      const ops::SoftmaxParams params = {.heads = c.heads, .scale = 0.2f, .window = window};
      ops::run(cpu, softmax(t.host(false), params));
      ops::run(gpu(), softmax(t.device(false), params));
      EXPECT_LE(t.error(), test::kBf16Error) << c.head_dim << " channels, window " << window;
      EXPECT_TRUE(t.gaps_intact());
    }
  }
}

TEST_F(Decode, StickBreakingMatchesTheCpu) {
  for (const Case& c : kCases) {
    const Tensors t(gpu(), c);
    for (const bool gate : {false, true}) {
      for (const bool attend_current : {false, true}) {
        for (const auto remainder :
             {ops::Remainder::kNone, ops::Remainder::kValue, ops::Remainder::kBias}) {
          const ops::StickBreakingParams params = {.heads = c.heads,
                                                   .scale = 0.1f,
                                                   .attend_current = attend_current,
                                                   .remainder = remainder};
          ops::run(cpu, stickbreaking(t.host(gate), params));
          ops::run(gpu(), stickbreaking(t.device(gate), params));
          EXPECT_LE(t.error(), test::kBf16Error)
              << c.head_dim << " channels, gate " << gate << ", current " << attend_current;
          EXPECT_TRUE(t.gaps_intact());
        }
      }
    }
  }
}

// The keys that skipping drops have a total weight below epsilon.
TEST_F(Decode, StickBreakingSkips) {
  const Case c = {24, 64, 700, 0, 24};
  const Tensors t(gpu(), c);
  ops::StickBreakingParams params = {.heads = c.heads, .scale = 0.1f};
  ops::run(cpu, stickbreaking(t.host(false), params));
  params.skip_epsilon = 1e-4f;
  ops::run(gpu(), stickbreaking(t.device(false), params));
  EXPECT_LE(t.error(), test::kBf16Error);
}

// The token's own key and value come from outside the caches, where the op puts them.
TEST_F(Decode, AppendsItsOwnKeyAndValue) {
  for (const Case& c : kCases) {
    const int64_t batch = 3;
    const int64_t width = c.key_heads * c.head_dim;
    const auto capacity = static_cast<int32_t>(c.capacity);
    const std::vector<int32_t> lengths = {1, capacity / 2, capacity};
    const Owned q = test::random_bf16("q", {batch, c.heads * c.head_dim});
    const Owned k = test::random_bf16("own k", {batch, width});
    const Owned v = test::random_bf16("own v", {batch, width});
    const Owned k_cache = test::random_bf16("k", {batch, c.capacity, width});
    const Owned v_cache = test::random_bf16("v", {batch, c.capacity, width});
    const Owned lengths_B = test::integers(lengths);
    const OnGpu k_gpu(gpu(), k_cache, kBF16);
    const OnGpu v_gpu(gpu(), v_cache, kBF16);
    const OnGpu o_gpu(gpu(), kBF16, {batch, c.heads * c.head_dim});
    const OnGpu q_gpu(gpu(), q, kBF16);
    const OnGpu own_k(gpu(), k, kBF16, c.gap);
    const OnGpu own_v(gpu(), v, kBF16, c.gap);
    const OnGpu lengths_gpu(gpu(), lengths_B, kI32);
    const Owned expected = test::poisoned({batch, c.heads * c.head_dim});
    const auto compare = [&](auto host, auto device) {
      ops::run(cpu, host);
      ops::run(gpu(), device);
      EXPECT_LE(test::relative_error(o_gpu, expected), test::kBf16Error) << c.head_dim;
      EXPECT_EQ(k_gpu.values(), test::to_f64(k_cache));
      EXPECT_EQ(v_gpu.values(), test::to_f64(v_cache));
    };
    const auto with = [&](auto op, bool device) {
      op.o_BHd = device ? o_gpu.tensor() : expected.tensor();
      op.q_BHd = device ? q_gpu.tensor() : q.tensor();
      op.k_BGd = device ? own_k.tensor() : k.tensor();
      op.v_BGd = device ? own_v.tensor() : v.tensor();
      op.k_cache_BCGd = device ? k_gpu.tensor() : k_cache.tensor();
      op.v_cache_BCGd = device ? v_gpu.tensor() : v_cache.tensor();
      op.lengths_B = device ? lengths_gpu.tensor() : lengths_B.tensor();
      return op;
    };
    ops::SoftmaxDecode softmax;
    softmax.params = {.heads = c.heads, .scale = 0.1f};
    compare(with(softmax, false), with(softmax, true));
    ops::StickBreakingDecode stickbreaking;
    stickbreaking.params = {.heads = c.heads,
                            .scale = 0.1f,
                            .attend_current = true,
                            .remainder = ops::Remainder::kValue};
    compare(with(stickbreaking, false), with(stickbreaking, true));
  }
}

// Alone, a long sequence is shared by many blocks; among many it is not.
TEST_F(Decode, BitsDoNotDependOnTheOtherSequences) {
  constexpr int64_t kBatch = 70;
  constexpr int64_t kWidth = 8 * 64;
  constexpr int32_t kCapacity = 1300;
  const OnGpu q(gpu(), test::random_bf16("q", {kBatch, kWidth}), kBF16);
  const OnGpu k(gpu(), test::random_bf16("k", {kBatch, kCapacity, kWidth}), kBF16);
  const OnGpu v(gpu(), test::random_bf16("v", {kBatch, kCapacity, kWidth}), kBF16);
  std::vector<int32_t> lengths(kBatch, 3);
  lengths[5] = kCapacity;
  lengths[6] = 257;
  const OnGpu lengths_B(gpu(), test::integers(lengths), kI32);
  const auto run = [&](auto op, int64_t first, int64_t count) {
    const OnGpu o(gpu(), kBF16, {count, kWidth});
    op.o_BHd = o;
    op.q_BHd = q.tensor().row_range(first, count);
    op.k_cache_BCGd = k.tensor().row_range(first, count);
    op.v_cache_BCGd = v.tensor().row_range(first, count);
    op.lengths_B = lengths_B.tensor().row_range(first, count);
    ops::run(gpu(), op);
    return o.values();
  };
  const auto compare = [&](const auto& op) {
    const std::vector<double> all = run(op, 0, kBatch);
    for (const int64_t b : {5, 6, 7}) {
      const auto begin = all.begin() + b * kWidth;
      EXPECT_EQ(run(op, b, 1), std::vector<double>(begin, begin + kWidth)) << lengths[b] << " keys";
    }
  };
  ops::SoftmaxDecode softmax;
  softmax.params = {.heads = 8, .scale = 0.1f};
  compare(softmax);
  for (const float epsilon : {0.0f, 1e-6f, 1e-2f}) {
    ops::StickBreakingDecode sticks;
    sticks.params = {.heads = 8, .scale = 0.1f, .skip_epsilon = epsilon};
    compare(sticks);
  }
}

}  // namespace
}  // namespace sbtrain::decode_test
