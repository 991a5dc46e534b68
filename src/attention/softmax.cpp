// `softmax`: the attention of Llama, with rotary positions (arXiv 2104.09864), linear biases
// (ALiBi, arXiv 2108.12409), a learned function of the distance (FIRE, arXiv 2310.04418) or no
// positions (NoPE), and with or without a window.
#include <cmath>
#include <optional>

#include "attention/map.h"
#include "attention/projections.h"
#include "attention/registry.h"
#include "attention/rotary.h"
#include "attention/softmax_ring.h"
#include "core/error.h"
#include "ops/attention.h"
#include "ops/rope.h"

namespace sbtrain {
namespace {

constexpr const char* kFireC = "self_attn.fire.c";
constexpr const char* kFireM = "self_attn.fire.m";
constexpr const char* kFireW1 = "self_attn.fire.w1.weight";
constexpr const char* kFireB1 = "self_attn.fire.w1.bias";
constexpr const char* kFireW2 = "self_attn.fire.w2.weight";
constexpr const char* kFireB2 = "self_attn.fire.w2.bias";

struct Options {
  double logit_scale = 0.0;  // 0: 1/sqrt(head_dim)
  int64_t window = 0;        // 0: all
  PositionEncoding position = PositionEncoding::kRope;
  bool shared = false;  // FIRE: one network for all layers that set it
  double fire_length = ops::kFireLength;
  RotaryOptions rotary;
  QkvOptions qkv;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  describe_logit_scale(f, o.logit_scale);
  describe_window(f, o.window);
  f.add("position", o.position,
        "Position encoding: rotary, linear biases (ALiBi), a learned function of the distance "
        "(FIRE), or none (NoPE).");
  f.add("shared", o.shared, Rule{}.when("position", {"fire"}),
        "One FIRE network for all layers instead of one for each.");
  f.add(
      "fire_length", o.fire_length, above(0).when("position", {"fire"}).with_example(64),
      "L0 of FIRE in tokens: at first, queries at a smaller position divide distances by it, later "
      "ones by their own position. What is learned is the factor m of max(j, |m L0|).");
  describe(f, o.rotary);
  describe_rope_fraction(f, o.rotary);
  describe(f, o.qkv);
}

RotaryOptions* rotary_options(Options& o) {
  return o.position == PositionEncoding::kRope ? &o.rotary : nullptr;
}

std::optional<TransformersAttention> in_transformers(const Options& o) {
  TransformersAttention attention{.window = o.window,
                                  .logit_scale = o.logit_scale,
                                  .qkv_bias = o.qkv.qkv_bias,
                                  .qk_norm = o.qkv.qk_norm,
                                  .joint_qk_norm = o.qkv.joint_norm()};
  if (o.position == PositionEncoding::kNone) return attention;
  if (o.position != PositionEncoding::kRope) return {};
  attention.rotary = o.rotary;
  return attention;
}

std::vector<OptionProblem> check_options(const Options& o, const AttentionShape& model) {
  if (o.position != PositionEncoding::kRope) return {};
  return check(o.rotary, model);
}

std::string context_problem(const Options& o) {
  if (o.position != PositionEncoding::kFire) return {};
  return "FIRE's networks are not summed over ranks yet; take rope, alibi or none as position";
}

struct SoftmaxSaved : AttentionSaved {
  QkvSaved qkv;  // queries and keys rotated
  Buffer lse_HT;
  // Keys of other ranks, from begin_backward() on.
  std::unique_ptr<KeyRing> ring;
};

class SoftmaxAttention : public Attention {
 public:
  SoftmaxAttention(const Options& options, const AttentionShape& model)
      : model_(model),
        qkv_(model, options.qkv),
        position_(options.position),
        shared_(options.shared),
        fire_length_(static_cast<float>(options.fire_length)),
        params_{.heads = static_cast<int>(model.heads),
                .scale = logit_scale(options.logit_scale, model),
                .window = options.window} {
    if (position_ != PositionEncoding::kRope) return;
    rotary_.emplace(options.rotary, model);
    params_.scale *= static_cast<float>(rotary_->logit_factor());
  }

  std::vector<TensorSpec> parameters() const override {
    std::vector<TensorSpec> specs = qkv_.parameters();
    if (position_ == PositionEncoding::kFire && !shared_) add_fire_parameters(specs);
    return specs;
  }
  std::vector<TensorSpec> shared_parameters() const override {
    std::vector<TensorSpec> specs;
    if (position_ == PositionEncoding::kFire && shared_) add_fire_parameters(specs);
    return specs;
  }

  int64_t mix_width(int64_t /*model_width*/) const override { return model_.query_width(); }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    auto saved = std::make_unique<SoftmaxSaved>();
    saved->qkv = qkv_.allocate(memory, tokens);
    saved->lse_HT =
        memory.allocate(MemoryClass::kAttention, "lse", DType::kF32, {model_.heads, tokens});
    return saved;
  }

  bool reads_fp8(const Stream& s, int64_t tokens) const override { return qkv_.in_fp8(s, tokens); }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<SoftmaxSaved&>(saved);
    const Qkv x = qkv_.forward(s, mine.qkv, x_TD, w, /*query_factor=*/1.0f, mine.x_amax_1);
    rotate(s, x.qk, sequences.positions_T, sequences.rope_length());
    const std::unique_ptr<KeyRing> ring = key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kForward);
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::SoftmaxForward{.o_THd = own.rows(mix_TD),
                                      .lse_HT = own.per_head(mine.lse_HT),
                                      .q_THd = own.rows(x.q),
                                      .k_THd = own.rows(x.k),
                                      .v_THd = own.rows(x.v),
                                      .bias = bias(w),
                                      .sequences = own.sequences,
                                      .params = params_});
    }
    if (ring) add_far_softmax(s, mix_TD, mine.lse_HT, far_softmax(x, w), *ring);
  }

  void begin_backward(Stream& s, AttentionSaved& saved, const Sequences& sequences) const override {
    auto& mine = static_cast<SoftmaxSaved&>(saved);
    const Qkv x = qkv_.saved(mine.qkv);
    mine.ring = key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kBackward);
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    auto& mine = static_cast<SoftmaxSaved&>(saved);
    const Buffer dqkv = qkv_.gradients(s, x_TD.rows());
    const Qkv x = qkv_.saved(mine.qkv);
    const Qkv dx = qkv_.view(dqkv);
    std::optional<FarSoftmaxBackward> far;
    if (mine.ring) {
      far.emplace(s, dmix_TD, mix_TD, mine.lse_HT, far_softmax(x, w), std::move(mine.ring));
    }
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::SoftmaxBackward{.dq_THd = own.rows(dx.q),
                                       .dk_THd = own.rows(dx.k),
                                       .dv_THd = own.rows(dx.v),
                                       .dfire = bias(dw).fire,
                                       .do_THd = own.rows(dmix_TD),
                                       .o_THd = own.rows(mix_TD),
                                       .lse_HT = own.per_head(mine.lse_HT),
                                       .q_THd = own.rows(x.q),
                                       .k_THd = own.rows(x.k),
                                       .v_THd = own.rows(x.v),
                                       .bias = bias(w),
                                       .sequences = own.sequences,
                                       .params = params_});
    }
    if (far) far->add_to({dx.q, dx.k, dx.v});
    far.reset();
    rotate(s, dx.qk, sequences.positions_T, sequences.rope_length(), nullptr, true);
    qkv_.backward(s, dx_TD, dw, dqkv, mine.qkv, x_TD, w, mine.x_amax_1);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t capacity) const override {
    return std::make_unique<KeyValueCache>(memory, sequences, capacity, model_.key_width());
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const Qkv x = qkv_.saved(static_cast<const SoftmaxSaved&>(saved).qkv);
    auto& mine = static_cast<KeyValueCache&>(cache);
    mine.k.prefill(s, b, x.k);
    mine.v.prefill(s, b, x.v);
  }

  bool norms_input() const override { return true; }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    auto& mine = static_cast<KeyValueCache&>(cache);
    const int64_t sequences = x_BD.rows();
    const QkvSaved qkv = qkv_.scratch(s, sequences);
    const Qkv x = qkv_.decode(s, qkv, x_BD, w, step.norm);
    rotate(s, x.qk, step.positions_B, mine.k.capacity(), &step);
    ops::run(s, ops::SoftmaxDecode{.o_BHd = mix_BD,
                                   .q_BHd = x.q,
                                   .k_BGd = x.k,
                                   .v_BGd = x.v,
                                   .k_cache_BCGd = mine.k.first(sequences),
                                   .v_cache_BCGd = mine.v.first(sequences),
                                   .lengths_B = step.lengths_B,
                                   .bias = bias(w),
                                   .params = params_});
  }

  AttentionMap map(Stream& s, const Weights& w, const AttentionSaved& saved,
                   const Sequences& /*sequences*/, int64_t head) const override {
    const Qkv x = qkv_.saved(static_cast<const SoftmaxSaved&>(saved).qkv);
    const int64_t heads = model_.heads;
    const LogitBias bias = position_ == PositionEncoding::kFire
                               ? fire_bias(download(s, fire(w)), head)
                               : distance_bias(head);
    return make_map(x.q.rows(),
                    softmax_weights(download_head(s, x.q, heads, head),
                                    download_head(s, x.k, qkv_.key_heads(), qkv_.key_head(head)),
                                    params_, bias));
  }

  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t max_seqlen) const override {
    HostQkv x = qkv_.reference(x_TD, w);
    if (rotary_) {
      const ops::RopeParams rope = rotary_->params(model_.heads, max_seqlen);
      sbtrain::rotate(x.q, rope);
      sbtrain::rotate(x.k, rope);
    }
    HostMatrix o(x_TD.rows, model_.query_width());
    for (int64_t h = 0; h < model_.heads; ++h) {
      const LogitBias bias = position_ == PositionEncoding::kFire
                                 ? fire_bias({.c_1 = at(w, kFireC),
                                              .m_1 = at(w, kFireM),
                                              .w1_K = at(w, kFireW1),
                                              .b1_K = at(w, kFireB1),
                                              .w2_HK = at(w, kFireW2),
                                              .b2_H = at(w, kFireB2),
                                              .length = fire_length_},
                                             h)
                                 : distance_bias(h);
      mix_head(
          o, model_.heads, h, x.v,
          softmax_weights(x.q_head(model_.heads, h), x.k_head(model_.heads, h), params_, bias));
    }
    return o;
  }

  double seen_keys(double keys) const override { return keys_in_window(keys, params_.window); }

  double flops_per_token(double keys) const override {
    double flops = 4.0 * static_cast<double>(model_.query_width());
    if (position_ == PositionEncoding::kFire) {
      flops += 4.0 * static_cast<double>(model_.heads * ops::kFireHidden);
    }
    return flops * seen_keys(keys);
  }

 private:
  FarSoftmax far_softmax(const Qkv& x, const Weights& w) const {
    return {.q_THd = x.q, .k_THd = x.k, .v_THd = x.v, .bias = bias(w), .params = params_};
  }

  bool biased() const {
    return position_ == PositionEncoding::kAlibi || position_ == PositionEncoding::kFire;
  }

  void add_fire_parameters(std::vector<TensorSpec>& specs) const {
    const auto add = [&](const char* name, std::vector<int64_t> shape, Init init, bool decay) {
      specs.push_back({.name = name,
                       .shape = std::move(shape),
                       .storage = {},
                       .init = init,
                       .decay = decay,
                       .fused = false});
    };
    // The standard deviations of uniform numbers in +-1 / sqrt(inputs).
    constexpr int64_t K = ops::kFireHidden;
    const Init first = Init::normal(std::sqrt(1.0 / 3));
    const Init second = Init::normal(std::sqrt(1.0 / (3 * K)));
    add(kFireC, {1}, Init::constant(0.1), false);
    add(kFireM, {1}, Init::constant(1.0), false);
    add(kFireW1, {K, 1}, first, true);
    add(kFireB1, {K}, first, false);
    add(kFireW2, {model_.heads, K}, second, true);
    add(kFireB2, {model_.heads}, Init::constant(0.0), false);
  }

  LogitBias distance_bias(int64_t head) const {
    return position_ == PositionEncoding::kAlibi ? alibi_bias(model_.heads, head) : no_bias();
  }

  ops::FireTensors fire(const Weights& w) const {
    return {.c_1 = w.at(kFireC),
            .m_1 = w.at(kFireM),
            .w1_K = w.at(kFireW1),
            .b1_K = w.at(kFireB1),
            .w2_HK = w.at(kFireW2),
            .b2_H = w.at(kFireB2),
            .length = fire_length_};
  }
  ops::SoftmaxBias bias(const Weights& w) const {
    if (!biased()) return {};
    if (position_ == PositionEncoding::kAlibi) return {.kind = ops::PositionBias::kAlibi};
    return {.kind = ops::PositionBias::kFire, .fire = fire(w)};
  }

  // Rotates the queries and keys.
  void rotate(Stream& s, const Tensor& qk, const Tensor& positions, int64_t length,
              const DecodeStep* step = nullptr, bool inverse = false) const {
    if (!rotary_) return;
    const int64_t heads = qkv_.heads() + qkv_.key_heads();
    ops::run(s, ops::Rope{.x_THd = qk,
                          .positions_T = positions,
                          .params = rotary_->params(heads, length, inverse),
                          .lengths_T = step != nullptr ? rotary_->lengths(*step) : Tensor()});
  }

  AttentionShape model_;
  QkvProjection qkv_;
  PositionEncoding position_;
  bool shared_;  // FIRE
  float fire_length_;
  ops::SoftmaxParams params_;
  std::optional<Rotary> rotary_;
};

}  // namespace

void register_softmax(AttentionRegistry& registry) {
  registry.add<Options>(
      {.name = "softmax",
       .grouped_heads = true,
       .own_head_dim = true,
       .make = make_module<SoftmaxAttention, Options>,
       .check = check_options,
       .context_problem = context_problem,
       .rotary = rotary_options,
       .transformers = in_transformers,
       .bench = {{.name = "softmax", .options = {{"position", "none"}}},
                 {.name = "alibi", .options = {{"position", "alibi"}}},
                 {.name = "fire", .options = {{"position", "fire"}}},
                 {.name = "window", .options = {{"position", "none"}, {"window", "512"}}}}});
}

}  // namespace sbtrain
