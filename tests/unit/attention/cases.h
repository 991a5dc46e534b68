// One attention problem, for both the CPU backend and the oracle.
#pragma once

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "support/tensors.h"
#include "unit/attention/oracle.h"

namespace sbtrain::test {

enum class Inputs : uint8_t {
  kStandard,  // std 1
  kTrained,   // q mean +1, k mean -1, std 0.25: as trained models have them
};

enum class Bias : uint8_t { kNone, kAlibi, kFire };

struct Case {
  std::vector<int32_t> documents = {16};  // lengths
  int heads = 2;
  int64_t head_dim = 16;
  int group = 1;  // heads of queries that share a head of keys and values
  Inputs inputs = Inputs::kStandard;
  // stick-breaking
  bool attend_current = false;
  ops::Remainder remainder = ops::Remainder::kNone;
  bool gated = false;
  bool remainder_gradient = false;  // the remainder has a gradient of its own
  float query_factor = 1.0f;        // by which the tests of GPUs have multiplied q
  float skip_epsilon = 0.0f;
  // softmax
  int64_t window = 0;
  Bias bias = Bias::kNone;
  float fire_m = 1.0f;
  float fire_length = ops::kFireLength;  // L0
  std::optional<float> scale{};          // 1/sqrt(head_dim) without

  int64_t tokens() const { return std::accumulate(documents.begin(), documents.end(), int64_t{0}); }
  int64_t width() const { return heads * head_dim; }
  int64_t key_width() const { return width() / group; }
  int64_t qkv_width() const { return width() + 2 * key_width(); }
  float logit_scale() const {
    return scale.value_or(1.0f / std::sqrt(static_cast<float>(head_dim)));
  }
  std::vector<int32_t> bounds() const {
    std::vector<int32_t> bounds = {0};
    for (const int32_t length : documents) bounds.push_back(bounds.back() + length);
    return bounds;
  }
  std::string describe() const {
    std::string text = "documents";
    for (const int32_t length : documents) text += " " + std::to_string(length);
    text += inputs == Inputs::kTrained ? ", trained-like" : ", std 1";
    if (group > 1) {
      text += ", " + std::to_string(heads) + " heads in groups of " + std::to_string(group);
    }
    if (attend_current) text += ", attend_current";
    if (remainder == ops::Remainder::kValue) text += ", remainder value";
    if (remainder == ops::Remainder::kBias) text += ", remainder bias";
    if (gated) text += ", gate";
    if (remainder_gradient) text += ", gradient of the remainder";
    if (skip_epsilon > 0) text += ", skip";
    if (window > 0) text += ", window " + std::to_string(window);
    if (bias == Bias::kAlibi) text += ", ALiBi";
    if (bias == Bias::kFire)
      text += ", FIRE with m " + std::to_string(fire_m) + ", L0 " + std::to_string(fire_length);
    return text;
  }
};

// Every option of stick-breaking except skipping, for the given documents and inputs.
inline std::vector<Case> stickbreaking_options(const Case& base) {
  std::vector<Case> cases;
  for (const bool attend_current : {false, true}) {
    for (const auto remainder :
         {ops::Remainder::kNone, ops::Remainder::kValue, ops::Remainder::kBias}) {
      for (const bool gated : {false, true}) {
        for (const bool remainder_gradient : {false, true}) {
          Case c = base;
          c.attend_current = attend_current;
          c.remainder = remainder;
          c.gated = gated;
          c.remainder_gradient = remainder_gradient;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

// Inputs and outputs of one case; outputs start poisoned. q, k and v are columns of one matrix,
// and so are their gradients.
struct Attention {
  explicit Attention(const Case& c)
      : config(c),
        qkv(random_normal("qkv", {c.tokens(), c.qkv_width()})),
        dout(random_normal("do", {c.tokens(), c.width()})),
        gate(generated({c.tokens(), c.heads}, 0,
                       [](int64_t i) {
                         // In (0, 1], some exactly 1.
                         const Philox random(1, RandomPurpose::kTest, "gate");
                         const double u = random.uniform(static_cast<uint64_t>(i));
                         return u > 0.8 ? 1.0 : 0.2 + u;
                       })),
        bias(random_normal("bias", {c.heads, c.head_dim})),
        drem(random_normal("drem", {c.heads, c.tokens()})),
        bounds(integers(c.bounds())),
        o(poisoned({c.tokens(), c.width()}, 3)),
        row(poisoned({c.heads, c.tokens()})),
        log2_rem(poisoned({c.heads, c.tokens()})),
        stop(DType::kI32, {c.heads, c.tokens()}),
        dqkv(poisoned({c.tokens(), c.qkv_width()})),
        dgate(poisoned({c.tokens(), c.heads})),
        dbias(constant({c.heads, c.head_dim}, 0.0)),
        fire(random_normal("fire", {2 + 2 * ops::kFireHidden + c.heads * (ops::kFireHidden + 1)})),
        dfire(constant({fire.tensor().numel()}, 0.0)) {
    fire.f32()[0] = 0.1f;
    fire.f32()[1] = c.fire_m;
    if (c.inputs == Inputs::kTrained) {
      for (int64_t t = 0; t < c.tokens(); ++t) {
        for (int64_t i = 0; i < c.width() + c.key_width(); ++i) {
          qkv.at(t, i) = qkv.at(t, i) * 0.25f + (i < c.width() ? 1.0f : -1.0f);
        }
      }
    }
  }

  Sequences sequences() const {
    Sequences s;
    s.cu_seqlens = bounds;
    s.count = static_cast<int64_t>(config.documents.size());
    s.max_seqlen = *std::max_element(config.documents.begin(), config.documents.end());
    return s;
  }
  // q, k or v, or its gradient, of all three side by side.
  Tensor part(const Tensor& all, int64_t index) const {
    if (index == 0) return all.col_range(0, config.width());
    return all.col_range(config.width() + (index - 1) * config.key_width(), config.key_width());
  }
  Tensor q() const { return part(qkv, 0); }
  Tensor k() const { return part(qkv, 1); }
  Tensor v() const { return part(qkv, 2); }
  Tensor gate_or_none() const { return config.gated ? gate.tensor() : Tensor(); }
  Tensor drem_or_none() const { return config.remainder_gradient ? drem.tensor() : Tensor(); }

  ops::FireTensors fire_tensors(const Owned& all) const {
    constexpr int64_t K = ops::kFireHidden;
    int64_t next = 0;
    const auto take = [&](int64_t count) {
      next += count;
      return all.tensor().row_range(next - count, count);
    };
    ops::FireTensors t;
    t.c_1 = take(1);
    t.m_1 = take(1);
    t.w1_K = take(K);
    t.b1_K = take(K);
    t.w2_HK = take(config.heads * K);
    t.b2_H = take(config.heads);
    t.length = config.fire_length;
    return t;
  }
  ops::SoftmaxBias softmax_bias() const {
    if (config.bias == Bias::kNone) return {};
    if (config.bias == Bias::kAlibi) return {.kind = ops::PositionBias::kAlibi};
    return {.kind = ops::PositionBias::kFire, .fire = fire_tensors(fire)};
  }

  ops::StickBreakingParams stickbreaking_params() const {
    return {.heads = config.heads,
            .scale = config.logit_scale(),
            .query_factor = config.query_factor,
            .attend_current = config.attend_current,
            .remainder = config.remainder,
            .skip_epsilon = config.skip_epsilon};
  }
  ops::SoftmaxParams softmax_params() const {
    return {.heads = config.heads, .scale = config.logit_scale(), .window = config.window};
  }

  void stickbreaking_forward() {
    ops::run(stream.stream, ops::StickBreakingForward{.o_THd = o,
                                                      .log2_rem_HT = log2_rem,
                                                      .stop_HT = stop,
                                                      .q_THd = q(),
                                                      .k_THd = k(),
                                                      .v_THd = v(),
                                                      .gate_TH = gate_or_none(),
                                                      .remainder_bias_Hd = bias,
                                                      .sequences = sequences(),
                                                      .params = stickbreaking_params()});
    for (int64_t i = 0; i < row.tensor().numel(); ++i) row.f32()[i] = std::exp2(log2_rem.f32()[i]);
  }
  void stickbreaking_backward() {
    ops::run(stream.stream, ops::StickBreakingBackward{.dq_THd = part(dqkv, 0),
                                                       .dk_THd = part(dqkv, 1),
                                                       .dv_THd = part(dqkv, 2),
                                                       .dgate_TH = dgate,
                                                       .dremainder_bias_Hd = dbias,
                                                       .do_THd = dout,
                                                       .drem_HT = drem_or_none(),
                                                       .log2_rem_HT = log2_rem,
                                                       .stop_HT = stop,
                                                       .q_THd = q(),
                                                       .k_THd = k(),
                                                       .v_THd = v(),
                                                       .gate_TH = gate_or_none(),
                                                       .remainder_bias_Hd = bias,
                                                       .sequences = sequences(),
                                                       .params = stickbreaking_params()});
  }
  void softmax_forward() {
    ops::run(stream.stream, ops::SoftmaxForward{.o_THd = o,
                                                .lse_HT = row,
                                                .q_THd = q(),
                                                .k_THd = k(),
                                                .v_THd = v(),
                                                .bias = softmax_bias(),
                                                .sequences = sequences(),
                                                .params = softmax_params()});
  }
  void softmax_backward() {
    ops::run(stream.stream, ops::SoftmaxBackward{.dq_THd = part(dqkv, 0),
                                                 .dk_THd = part(dqkv, 1),
                                                 .dv_THd = part(dqkv, 2),
                                                 .dfire = fire_tensors(dfire),
                                                 .do_THd = dout,
                                                 .o_THd = o,
                                                 .lse_HT = row,
                                                 .q_THd = q(),
                                                 .k_THd = k(),
                                                 .v_THd = v(),
                                                 .bias = softmax_bias(),
                                                 .sequences = sequences(),
                                                 .params = softmax_params()});
  }

  oracle::Problem problem() const {
    oracle::Problem p;
    p.tokens = config.tokens();
    p.heads = config.heads;
    p.head_dim = config.head_dim;
    p.group = config.group;
    p.bounds = config.bounds();
    p.scale = config.logit_scale();
    p.q = to_f64(q());
    p.k = to_f64(k());
    p.v = to_f64(v());
    p.dout = to_f64(dout);
    p.attend_current = config.attend_current;
    p.remainder = static_cast<oracle::Remainder>(config.remainder);
    if (config.gated) p.gate = to_f64(gate);
    if (config.remainder_gradient) p.drem = to_f64(drem);
    if (config.remainder == ops::Remainder::kBias) p.bias = to_f64(bias);
    p.window = config.window;
    if (config.bias == Bias::kAlibi) {
      for (int h = 0; h < config.heads; ++h) {
        p.slopes.push_back(ops::alibi_slope(config.heads, h));
      }
    }
    if (config.bias == Bias::kFire) p.fire = to_f64(fire);
    p.fire_length = static_cast<double>(config.fire_length);
    return p;
  }

  Case config;
  CpuStream stream;
  Owned qkv, dout, gate, bias, drem, bounds;
  Owned o, row, log2_rem, stop, dqkv, dgate, dbias;  // row: the remainder, or log-sum-exp
  Owned fire, dfire;
};

}  // namespace sbtrain::test
