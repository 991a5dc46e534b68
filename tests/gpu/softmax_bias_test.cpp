// Softmax attention with ALiBi and FIRE on the GPU against the fp64 oracle, and their decoding
// against the CPU backend. Skipped if there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "gpu/op_test.h"
#include "kernels/limits.h"
#include "ops/attention.h"
#include "ops/memory.h"
#include "unit/attention/oracle.h"

namespace sbtrain::test {
namespace {

constexpr DType kBF16 = DType::kBF16;
constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;
constexpr int64_t kUnits = ops::kFireHidden;
constexpr int64_t kGap = 8;  // elements after each row that no kernel may touch

// Kinds of parameters of FIRE.
enum class Fire : uint8_t {
  kStandard,   // units break at many distances
  kFlat,       // no unit depends on the distance
  kFalling,    // all units become inactive with distance
  kOutside,    // no break lies at a distance that occurs
  kOneBreak,   // all units break at one distance
  kNearZeroC,  // psi hardly grows
  kNegative,   // c and m are negative, |m L0| is large
  kShort,      // m = 0: the denominator depends on the query only
};

struct Case {
  std::vector<int32_t> documents;
  std::optional<Fire> fire{};  // none: ALiBi
  int heads = 2;
  int64_t head_dim = 64;
  int64_t window = 0;
  double size = 1;                  // of q and k
  float length = ops::kFireLength;  // FIRE's L0
  int group = 1;                    // heads of queries that share a head of keys and values

  int64_t tokens() const { return std::accumulate(documents.begin(), documents.end(), int64_t{0}); }
  int64_t width() const { return heads * head_dim; }
  int64_t key_width() const { return width() / group; }
  int64_t qkv_width() const { return width() + 2 * key_width(); }
  // q, k or v, or its gradient, of all three side by side.
  Tensor part(const Tensor& all, int64_t index) const {
    if (index == 0) return all.col_range(0, width());
    return all.col_range(width() + (index - 1) * key_width(), key_width());
  }
  std::string describe() const {
    return (fire ? "FIRE " + std::to_string(static_cast<int>(*fire)) + " of L0 " +
                       std::to_string(length)
                 : std::string("ALiBi")) +
           ", " + std::to_string(documents.size()) + " documents, " + std::to_string(tokens()) +
           " tokens, " + std::to_string(heads) + " heads of " + std::to_string(head_dim) +
           " in groups of " + std::to_string(group) + ", window " + std::to_string(window) +
           ", q and k times " + std::to_string(size);
  }
};
// Documents end at, before and after the ends of tiles.
const std::vector<int32_t> kMixed = {1, 2, 127, 128, 129, 500, 1, 1};
const std::vector<int32_t> kLong = {3, 3000, 70};

// c, m, w1, b1, w2, b2, in the order of the oracle.
Owned fire_numbers(Fire kind, int heads) {
  Owned x = random_normal("fire", {2 + 2 * kUnits + heads * (kUnits + 1)}, 0.6);
  float* const c = x.f32();
  float* const w1 = c + 2;
  float* const b1 = w1 + kUnits;
  c[0] = kind == Fire::kNearZeroC ? 1e-4f : kind == Fire::kNegative ? -0.3f : 0.1f;
  c[1] = kind == Fire::kNegative ? -3.0f : kind == Fire::kShort ? 0.0f : 0.25f;
  for (int64_t k = 0; k < kUnits; ++k) {
    if (kind == Fire::kFlat) w1[k] = 0.0f;
    if (kind == Fire::kFalling) {
      w1[k] = -std::abs(w1[k]);
      b1[k] = std::abs(b1[k]);
    }
    if (kind == Fire::kOutside) b1[k] = k % 2 == 0 ? 3.0f : -3.0f;
    if (kind == Fire::kOneBreak) b1[k] = -0.5f * w1[k];
  }
  for (int64_t i = 0; i < x.tensor().numel(); ++i) c[i] = from_bf16(to_bf16(c[i]));
  return x;
}

ops::FireTensors fire_tensors(const Tensor& all, int heads, float length = ops::kFireLength) {
  int64_t next = 0;
  const auto take = [&](int64_t count) {
    next += count;
    return all.row_range(next - count, count);
  };
  ops::FireTensors t;
  t.c_1 = take(1);
  t.m_1 = take(1);
  t.w1_K = take(kUnits);
  t.b1_K = take(kUnits);
  t.w2_HK = take(heads * kUnits);
  t.b2_H = take(heads);
  t.length = length;
  return t;
}

class Problem {
 public:
  explicit Problem(const Case& c)
      : config(c),
        qkv(random_bf16("qkv", {c.tokens(), c.qkv_width()})),
        dout(random_bf16("do", {c.tokens(), c.width()})),
        fire(fire_numbers(c.fire.value_or(Fire::kStandard), c.heads)) {
    for (const int32_t length : c.documents) {
      bounds.push_back(bounds.back() + length);
      for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    }
    for (int64_t t = 0; t < c.tokens(); ++t) {
      for (int64_t i = 0; i < c.width() + c.key_width(); ++i) {
        qkv.at(t, i) = from_bf16(to_bf16(qkv.at(t, i) * static_cast<float>(c.size)));
      }
    }
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(config.head_dim)); }
  ops::SoftmaxParams params() const {
    return {.heads = config.heads, .scale = scale(), .window = config.window};
  }
  oracle::Result expected() const {
    oracle::Problem p;
    p.tokens = config.tokens();
    p.heads = config.heads;
    p.head_dim = config.head_dim;
    p.group = config.group;
    p.bounds = bounds;
    p.scale = scale();
    p.window = config.window;
    p.q = part(0);
    p.k = part(1);
    p.v = part(2);
    p.dout = to_f64(dout);
    if (config.fire) p.fire = to_f64(fire);
    p.fire_length = static_cast<double>(config.length);
    for (int h = 0; h < config.heads && !config.fire; ++h) {
      p.slopes.push_back(static_cast<double>(ops::alibi_slope(config.heads, h)));
    }
    return oracle::softmax(p);
  }
  std::vector<double> part(int64_t index) const { return to_f64(config.part(qkv, index)); }

  const Case config;
  Owned qkv, dout, fire;
  std::vector<int32_t> bounds = {0}, positions;
};

// The value of gradients before the backward pass, which adds to them.
constexpr double kBefore = 0.5;

// One forward and one backward pass.
class Pass {
 public:
  Pass(GpuStream& s, const Problem& x)
      : heads_(x.config.heads),
        width_(x.config.width()),
        key_width_(x.config.key_width()),
        o(s, kBF16, {x.config.tokens(), width_}, kGap),
        dqkv(s, kBF16, {x.config.tokens(), x.config.qkv_width()}, kGap),
        lse(s, kF32, {heads_, x.config.tokens()}),
        dfire(s, constant({x.fire.tensor().numel()}, kBefore), kF32) {
    const OnGpu qkv(s, x.qkv, kBF16, kGap), dout(s, x.dout, kBF16, kGap), fire(s, x.fire, kBF16);
    const OnGpu bounds(s, integers(x.bounds), kI32), positions(s, integers(x.positions), kI32);
    const Sequences sequences{
        .cu_seqlens = bounds,
        .positions_T = positions,
        .count = static_cast<int64_t>(x.config.documents.size()),
        .max_seqlen = *std::max_element(x.config.documents.begin(), x.config.documents.end())};
    const auto part = [&](const OnGpu& all, int64_t index) {
      return x.config.part(all.tensor(), index);
    };
    ops::SoftmaxBias bias{.kind = ops::PositionBias::kAlibi};
    ops::FireTensors gradients;
    if (x.config.fire) {
      bias = {.kind = ops::PositionBias::kFire,
              .fire = fire_tensors(fire, heads_, x.config.length)};
      gradients = fire_tensors(dfire, heads_);
    }
    ops::run(s, ops::SoftmaxForward{.o_THd = o,
                                    .lse_HT = lse,
                                    .q_THd = part(qkv, 0),
                                    .k_THd = part(qkv, 1),
                                    .v_THd = part(qkv, 2),
                                    .bias = bias,
                                    .sequences = sequences,
                                    .params = x.params()});
    ops::run(s, ops::SoftmaxBackward{.dq_THd = part(dqkv, 0),
                                     .dk_THd = part(dqkv, 1),
                                     .dv_THd = part(dqkv, 2),
                                     .dfire = gradients,
                                     .do_THd = dout,
                                     .o_THd = o,
                                     .lse_HT = lse,
                                     .q_THd = part(qkv, 0),
                                     .k_THd = part(qkv, 1),
                                     .v_THd = part(qkv, 2),
                                     .bias = bias,
                                     .sequences = sequences,
                                     .params = x.params()});
    ops::run(s, ops::Synchronize{});
  }
  // The gradient of q (index 0), k (1) or v (2).
  std::vector<double> gradient(int64_t index) const {
    const std::vector<double> all = dqkv.values();
    std::vector<double> out;
    const int64_t before = index == 0 ? 0 : width_ + (index - 1) * key_width_;
    for (size_t row = 0; row < all.size(); row += static_cast<size_t>(width_ + 2 * key_width_)) {
      const auto first = all.begin() + static_cast<int64_t>(row) + before;
      out.insert(out.end(), first, first + (index == 0 ? width_ : key_width_));
    }
    return out;
  }

 private:
  int heads_;
  int64_t width_, key_width_;

 public:
  OnGpu o, dqkv, lse, dfire;
};

// Some sums over pairs nearly cancel, and that of b2's gradient cancels completely. So the error of
// each part is relative to that part's gradient or to a small fraction of the whole gradient,
// whichever is larger.
void expect_fire_close(const std::vector<double>& actual, const std::vector<double>& expected,
                       int heads, const std::string& text) {
  double norm = 0;
  for (const double x : expected) norm += x * x;
  norm = std::sqrt(norm);
  size_t next = 0;
  const auto check = [&](const char* name, int64_t count) {
    double difference = 0, size = 0;
    for (const size_t end = next + static_cast<size_t>(count); next < end; ++next) {
      const double d = actual[next] - kBefore - expected[next];
      difference += d * d;
      size += expected[next] * expected[next];
    }
    const double error = std::sqrt(difference);
    std::printf("  d%s: error %.1e of %.1e\n", name, error, std::sqrt(size));
    EXPECT_LE(error, 1e-3 * std::max({std::sqrt(size), 0.01 * norm, 1e-3})) << name << ", " << text;
  };
  check("c", 1);
  check("m", 1);
  check("w1", kUnits);
  check("b1", kUnits);
  check("w2", heads * kUnits);
  check("b2", heads);
}

class GpuSoftmaxBias : public GpuOpTest {
 protected:
  // Whether the kernels for Hopper take the case on this GPU.
  bool takes_hopper(const Case& c) {
    const bool takes_heads = c.head_dim == 32 || c.head_dim == 64 || c.head_dim == 128;
    return gpu().stream.target().sm == 90 && takes_heads && c.group == 1 &&
           c.tokens() >= kernels::kHopperTokens;
  }
  void check(const std::vector<Case>& cases, const std::string& implementation = "portable") {
    gpu().stream.set_implementation(implementation);
    for (const Case& c : cases) {
      if (implementation == "hopper" && !takes_hopper(c)) continue;
      const std::string text = implementation + ", " + c.describe();
      std::printf("%s\n", text.c_str());
      const Problem x(c);
      const oracle::Result want = x.expected();
      const Pass pass(gpu(), x);
      EXPECT_LE(relative_error(pass.o, want.o), 4e-3) << "o, " << text;
      EXPECT_LE(relative_error(pass.lse, want.row), 1e-5) << "lse, " << text;
      EXPECT_LE(relative_error(pass.gradient(0), want.dq), 8e-3) << "dq, " << text;
      EXPECT_LE(relative_error(pass.gradient(1), want.dk), 8e-3) << "dk, " << text;
      EXPECT_LE(relative_error(pass.gradient(2), want.dv), 8e-3) << "dv, " << text;
      EXPECT_TRUE(pass.o.gaps_intact() && pass.dqkv.gaps_intact()) << text;
      if (c.fire) expect_fire_close(pass.dfire.values(), want.dfire, c.heads, text);
      const Pass again(gpu(), x);
      EXPECT_TRUE(again.o.raw() == pass.o.raw() && again.lse.raw() == pass.lse.raw()) << text;
      EXPECT_TRUE(again.dqkv.raw() == pass.dqkv.raw()) << text;
      EXPECT_TRUE(again.dfire.raw() == pass.dfire.raw()) << text;
    }
  }
};

std::vector<Case> shapes(std::optional<Fire> fire) {
  std::vector<Case> cases;
  for (const int64_t d : {32, 48, 64, 128, 136, 256}) {
    cases.push_back({.documents = kMixed, .fire = fire, .head_dim = d});
    cases.push_back({.documents = kMixed, .fire = fire, .head_dim = d, .window = 100});
    cases.push_back({.documents = kLong, .fire = fire, .heads = 1, .head_dim = d});
  }
  for (const int64_t window : {1, 3, 64, 1000}) {
    cases.push_back({.documents = kMixed, .fire = fire, .heads = 3, .window = window});
    cases.push_back(
        {.documents = kLong, .fire = fire, .heads = 1, .head_dim = 32, .window = window});
  }
  // Half of a tile of keys belongs to a document that has ended while many queries still see the
  // other half.
  cases.push_back({.documents = {100, 1000, 60, 900}, .fire = fire});
  cases.push_back({.documents = kMixed, .fire = fire, .size = 4});
  for (const int group : {2, 8}) {
    for (const int64_t d : {32, 64, 128}) {
      cases.push_back({.documents = {2, 127, 129, 500},
                       .fire = fire,
                       .heads = 8,
                       .head_dim = d,
                       .window = d == 64 ? 100 : 0,
                       .group = group});
    }
  }
  for (const float length : {40.0f, 1000.0f}) {
    cases.push_back({.documents = kMixed, .fire = fire, .window = 100, .length = length});
    cases.push_back({.documents = kLong, .fire = fire, .heads = 1, .length = length});
  }
  cases.push_back({.documents = {1}, .fire = fire});
  cases.push_back({.documents = std::vector<int32_t>(300, 3), .fire = fire});
  return cases;
}

TEST_F(GpuSoftmaxBias, Alibi) {
  check(shapes({}));
}
TEST_F(GpuSoftmaxBias, Fire) {
  check(shapes(Fire::kStandard));
}
TEST_F(GpuSoftmaxBias, FireOfAnyNumbers) {
  for (const Fire fire : {Fire::kFlat, Fire::kFalling, Fire::kOutside, Fire::kOneBreak,
                          Fire::kNearZeroC, Fire::kNegative, Fire::kShort}) {
    check({{.documents = kMixed, .fire = fire},
           {.documents = {900, 5}, .fire = fire, .heads = 1, .head_dim = 128, .window = 200}});
  }
}

TEST_F(GpuSoftmaxBias, AlibiOnHopper) {
  if (gpu().stream.target().sm != 90) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  check(shapes({}), "hopper");
}
TEST_F(GpuSoftmaxBias, FireOnHopper) {
  if (gpu().stream.target().sm != 90) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  check(shapes(Fire::kStandard), "hopper");
  for (const Fire fire : {Fire::kFlat, Fire::kFalling, Fire::kOutside, Fire::kOneBreak,
                          Fire::kNearZeroC, Fire::kNegative, Fire::kShort}) {
    check({{.documents = kMixed, .fire = fire},
           {.documents = {900, 5}, .fire = fire, .heads = 1, .head_dim = 128, .window = 200}},
          "hopper");
  }
}

// The results of both implementations differ by no more than each may differ from fp64.
TEST_F(GpuSoftmaxBias, HopperAgreesWithPortable) {
  if (gpu().stream.target().sm != 90) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  for (const std::optional<Fire> fire : {std::optional<Fire>(), std::optional(Fire::kStandard)}) {
    for (const int64_t d : {32, 64, 128}) {
      const Problem x({.documents = kMixed, .fire = fire, .head_dim = d, .window = 300});
      gpu().stream.set_implementation("portable");
      const Pass portable(gpu(), x);
      gpu().stream.set_implementation("hopper");
      const Pass hopper(gpu(), x);
      EXPECT_LE(relative_error(hopper.o, portable.o.values()), 4e-3) << d;
      EXPECT_LE(relative_error(hopper.lse, portable.lse.values()), 1e-5) << d;
      EXPECT_LE(relative_error(hopper.dqkv, portable.dqkv.values()), 8e-3) << d;
      if (fire) {
        EXPECT_LE(relative_error(hopper.dfire, portable.dfire.values()), 1e-3) << d;
      }
    }
  }
}

TEST_F(GpuSoftmaxBias, Decode) {
  for (const int64_t d : {5, 64, 128, 200}) {
    const int heads = 3;
    const int64_t capacity = 700, cols = heads * d;
    const Owned lengths = integers({1, 2, 63, 350, 699, 700});
    const int64_t batch = lengths.tensor().numel();
    const Owned q = random_bf16("q", {batch, cols}), k = random_bf16("k", {batch, capacity, cols}),
                v = random_bf16("v", {batch, capacity, cols});
    const OnGpu q_gpu(gpu(), q, kBF16, kGap), k_gpu(gpu(), k, kBF16), v_gpu(gpu(), v, kBF16),
        lengths_gpu(gpu(), lengths, kI32);
    for (const std::optional<Fire> kind :
         {std::optional<Fire>(), std::optional(Fire::kStandard), std::optional(Fire::kFalling),
          std::optional(Fire::kNegative)}) {
      const Owned fire = fire_numbers(kind.value_or(Fire::kStandard), heads);
      const OnGpu fire_gpu(gpu(), fire, kBF16);
      const auto bias_of = [&](const Tensor& numbers) {
        const float length = kind == Fire::kNegative ? 40.0f : ops::kFireLength;
        return kind ? ops::SoftmaxBias{.kind = ops::PositionBias::kFire,
                                       .fire = fire_tensors(numbers, heads, length)}
                    : ops::SoftmaxBias{.kind = ops::PositionBias::kAlibi};
      };
      for (const int64_t window : {0, 1, 5, 400}) {
        const ops::SoftmaxParams params{.heads = heads, .scale = 0.2f, .window = window};
        const Owned expected = poisoned({batch, cols});
        const OnGpu o(gpu(), kBF16, {batch, cols}, kGap);
        ops::run(cpu, ops::SoftmaxDecode{.o_BHd = expected,
                                         .q_BHd = q,
                                         .k_cache_BCGd = k,
                                         .v_cache_BCGd = v,
                                         .lengths_B = lengths,
                                         .bias = bias_of(fire),
                                         .params = params});
        ops::run(gpu(), ops::SoftmaxDecode{.o_BHd = o,
                                           .q_BHd = q_gpu,
                                           .k_cache_BCGd = k_gpu,
                                           .v_cache_BCGd = v_gpu,
                                           .lengths_B = lengths_gpu,
                                           .bias = bias_of(fire_gpu),
                                           .params = params});
        EXPECT_LE(relative_error(o, expected), kBf16Error)
            << (kind ? "FIRE" : "ALiBi") << ", " << d << " channels, window " << window;
        EXPECT_TRUE(o.gaps_intact());
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
