// `short_conv`: the gated convolution over three tokens that Based models mix with attention
// (arXiv 2402.18668):  y = conv(u) * (W u + b) + u.  Its output goes to the residual stream as it
// is, without a projection.

#include "ops/short_conv.h"

#include <cmath>

#include "attention/registry.h"
#include "layers/linear.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr const char* kConvWeight = "self_attn.conv.weight";
constexpr const char* kConvBias = "self_attn.conv.bias";
constexpr const char* kGateWeight = "self_attn.gate_proj.weight";
constexpr const char* kGateBias = "self_attn.gate_proj.bias";

struct ShortConvSaved : AttentionSaved {
  Buffer gate_TD;  // W u
  Buffer last_2D;  // u of the last two tokens, for a cache
  int64_t tokens = 0;
};

struct ShortConvCache : AttentionCache {
  Buffer state_B2D;
};

class ShortConv : public Attention {
 public:
  ShortConv(const NoOptions& /*options*/, const AttentionShape& model) : model_(model) {}

  std::vector<TensorSpec> parameters() const override {
    const int64_t d = model_.width;
    // The standard deviation of uniform numbers in +-1 / sqrt(taps).
    const double conv_std = std::sqrt(1.0 / (3 * ops::kShortConv));
    std::vector<TensorSpec> specs;
    const auto add = [&](const char* name, std::vector<int64_t> shape, Init init, bool decay) {
      specs.push_back({.name = name,
                       .shape = std::move(shape),
                       .storage = {},
                       .init = init,
                       .decay = decay,
                       .fused = false});
    };
    add(kConvWeight, {d, ops::kShortConv}, Init::normal(conv_std), true);
    add(kConvBias, {d}, Init::constant(0.0), false);
    gate_.add_parameters(specs);
    add(kGateBias, {d}, Init::constant(0.0), false);
    return specs;
  }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    auto saved = std::make_unique<ShortConvSaved>();
    saved->gate_TD = memory.allocate(MemoryClass::kAttention, "gate", memory.compute_dtype(),
                                     {tokens, model_.width});
    saved->last_2D = memory.allocate(MemoryClass::kAttention, "last inputs", memory.compute_dtype(),
                                     {2, model_.width});
    saved->tokens = tokens;
    return saved;
  }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<ShortConvSaved&>(saved);
    gate_.forward(s, mine.gate_TD, x_TD, w);
    ops::run(s, ops::ShortConvForward{.y_TD = mix_TD,
                                      .u_TD = x_TD,
                                      .gate_TD = mine.gate_TD,
                                      .positions_T = sequences.positions_T,
                                      .w = weights(w)});
    const int64_t last = std::min<int64_t>(2, mine.tokens);
    ops::run(s, ops::Copy{.y = mine.last_2D.tensor().row_range(2 - last, last),
                          .x = x_TD.row_range(mine.tokens - last, last)});
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor /*mix_TD*/,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    const auto& mine = static_cast<const ShortConvSaved&>(saved);
    const Buffer dgate =
        s.scratch("dgate", s.memory().compute_dtype(), {x_TD.rows(), model_.width});
    ops::run(s, ops::ShortConvBackward{.du_TD = dx_TD,
                                       .dgate_TD = dgate,
                                       .dy_TD = dmix_TD,
                                       .u_TD = x_TD,
                                       .gate_TD = mine.gate_TD,
                                       .positions_T = sequences.positions_T,
                                       .dw = weights(dw),
                                       .w = weights(w)});
    gate_.backward(s, dx_TD, dw, dgate, x_TD, w, /*accumulate=*/true);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t /*capacity*/) const override {
    auto cache = std::make_unique<ShortConvCache>();
    cache->state_B2D = memory.allocate(MemoryClass::kAttention, "last inputs",
                                       memory.compute_dtype(), {sequences, 2 * model_.width});
    return cache;
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const auto& from = static_cast<const ShortConvSaved&>(saved);
    const Tensor& state = static_cast<ShortConvCache&>(cache).state_B2D;
    const int64_t last = std::min<int64_t>(2, from.tokens);
    ops::run(
        s,
        ops::Copy{.y = state.row_range(b, 1).reshaped({2, model_.width}).row_range(2 - last, last),
                  .x = from.last_2D.tensor().row_range(2 - last, last)});
  }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    const Tensor& state = static_cast<ShortConvCache&>(cache).state_B2D;
    const Buffer gate = s.scratch("gate", s.memory().compute_dtype(), {x_BD.rows(), model_.width});
    gate_.forward(s, gate, x_BD, w);
    ops::run(s, ops::ShortConvDecode{.y_BD = mix_BD,
                                     .u_BD = x_BD,
                                     .gate_BD = gate,
                                     .state_B2D = state.row_range(0, x_BD.rows()),
                                     .positions_B = step.positions_B,
                                     .w = weights(w)});
  }

  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t /*max_seqlen*/) const override {
    const HostMatrix gate = project(x_TD, at(w, kGateWeight));
    HostMatrix y = x_TD;
    for (int64_t t = 0; t < y.rows; ++t) {
      for (int64_t c = 0; c < y.cols; ++c) {
        double conv = at(w, kConvBias).values[c];
        for (int64_t back = 0; back < ops::kShortConv && back <= t; ++back) {
          conv += at(w, kConvWeight).row(c)[ops::kShortConv - 1 - back] * x_TD.row(t - back)[c];
        }
        y.row(t)[c] += conv * (gate.row(t)[c] + at(w, kGateBias).values[c]);
      }
    }
    return y;
  }

  double flops_per_token(double /*keys*/) const override {
    return 2.0 * (ops::kShortConv + 1) * static_cast<double>(model_.width);
  }

 private:
  static ops::ShortConvWeights weights(const Weights& w) {
    return {.w_D3 = w.at(kConvWeight), .b_D = w.at(kConvBias), .gate_bias_D = w.at(kGateBias)};
  }

  AttentionShape model_;
  // The convolution adds the bias and forms its gradient.
  Linear gate_{{.parts = {{kGateWeight, model_.width}},
                .cols = model_.width,
                .init = Init::normal(model_.init_std),
                .role = ParamRole::kOther}};
};

}  // namespace

void register_short_conv(AttentionRegistry& registry) {
  registry.add<NoOptions>({.name = "short_conv",
                           .whole_heads = false,
                           .projects_output = false,
                           .own_head_dim = true,  // it has no heads
                           .make = make_module<ShortConv, NoOptions>});
}

}  // namespace sbtrain
