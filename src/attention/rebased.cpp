// `rebased` (arXiv 2402.10644) and `based` (arXiv 2402.18668): attention whose weights are a
// square, (q.k)^2 / f, or the second-order Taylor polynomial of exp(q.k / sqrt(f)). Queries and
// keys have few features, f for each head; ReBased normalises them, with one affine LayerNorm over
// the features of all heads for the queries and one for the keys, of which each part can be left
// out (its table 1). There are no positions: the order is known from the causal mask and from
// convolutions in other layers.

#include "ops/rebased.h"

#include <algorithm>
#include <cmath>

#include "attention/map.h"
#include "attention/projections.h"
#include "attention/registry.h"
#include "core/error.h"
#include "layers/linear.h"
#include "ops/linear.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/scale.h"

namespace sbtrain {
namespace {

enum class Form : uint8_t { kChunked, kQuadratic };

}  // namespace

template <>
inline constexpr auto kNames<Form> = enum_names<Form>({{Form::kChunked, "chunked"},
                                                       {Form::kQuadratic, "quadratic"}});

namespace {

struct Options {
  double logit_scale = 0.0;  // 0: 1/sqrt(feature_dim)
  int64_t feature_dim = 16;  // of queries and keys, for each head
  Form form = Form::kChunked;
  bool qkv_bias = false;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  f.add("logit_scale", o.logit_scale, at_least(0).with_example(0.7),
        "Factor of q.k; 0: 1/sqrt(feature_dim).");
  f.add("feature_dim", o.feature_dim, between(1, 256).with_example(4),
        "Features of queries and keys for each head; values have model.head_dim, or width / heads, "
        "rounded down.");
  f.add("form", o.form,
        "How it is computed: with a state, linear in the length, or over all pairs of tokens.");
  describe_qkv_bias(f, o.qkv_bias);
}

// What the features pass before they are multiplied: y = (x - mean) / std * gamma + beta, without
// the parts that are turned off.
struct Kernel {
  bool norm = false;
  bool gamma = false;
  bool beta = false;
  bool any() const { return norm || gamma || beta; }
};

struct RebasedOptions {
  Options common;
  bool norm = true;
  bool gamma = true;
  bool beta = true;
  Kernel kernel() const { return {.norm = norm, .gamma = gamma, .beta = beta}; }
  bool operator==(const RebasedOptions&) const = default;
};

void describe(Fields& f, RebasedOptions& o) {
  describe(f, o.common);
  f.add("feature_norm", o.norm, "Normalise the features of queries, and of keys, of all heads.");
  f.add("feature_gamma", o.gamma, "A learned factor of each feature, after the norm.");
  f.add("feature_beta", o.beta, "A learned number that is added to each feature, last.");
}

constexpr const char* kQNormWeight = "self_attn.q_norm.weight";
constexpr const char* kQNormBias = "self_attn.q_norm.bias";
constexpr const char* kKNormWeight = "self_attn.k_norm.weight";
constexpr const char* kKNormBias = "self_attn.k_norm.bias";
constexpr float kNormEps = 1e-5f;

struct RebasedSaved : AttentionSaved {
  Buffer qkv_TN;     // as projected
  Buffer norm_T2Hf;  // q and k after the kernel, if it has any part
  Buffer den_HT;
};

// The sums over all tokens so far; their size does not depend on the number of tokens.
struct RebasedCache : AttentionCache {
  Buffer state;  // [B, H * rows, e + 1]
};

class RebasedAttention : public Attention {
 public:
  // Based, without a kernel.
  RebasedAttention(const Options& options, const AttentionShape& model)
      : RebasedAttention(options, model, Kernel(), /*rebased=*/false) {}
  RebasedAttention(const RebasedOptions& options, const AttentionShape& model)
      : RebasedAttention(options.common, model, options.kernel(), /*rebased=*/true) {}
  RebasedAttention(const Options& options, const AttentionShape& model, const Kernel& kernel,
                   bool rebased)
      : model_(model),
        kernel_(kernel),
        features_(model.heads * options.feature_dim),
        values_(model.query_width()),
        qkv_(qkv_spec(model, {.q = features_, .k = features_, .v = values_}, options.qkv_bias)) {
    const double scale = options.logit_scale != 0.0
                             ? options.logit_scale
                             : 1.0 / std::sqrt(static_cast<double>(options.feature_dim));
    params_ = {.heads = static_cast<int>(model.heads),
               .scale = static_cast<float>(scale),
               .constant = rebased ? 0.0f : 1.0f,
               .linear = rebased ? 0.0f : 1.0f,
               .square = rebased ? 1.0f : 0.5f,
               .quadratic = options.form == Form::kQuadratic};
    state_rows_ = model.heads * ops::rebased_state_rows(options.feature_dim, params_);
  }

  int64_t mix_width(int64_t /*model_width*/) const override { return values_; }

  std::vector<TensorSpec> parameters() const override {
    std::vector<TensorSpec> specs = qkv_.parameters();
    for (const char* name : {kQNormWeight, kQNormBias, kKNormWeight, kKNormBias}) {
      const bool weight = name == kQNormWeight || name == kKNormWeight;
      if (!(weight ? kernel_.gamma : kernel_.beta)) continue;
      specs.push_back({.name = name,
                       .shape = {features_},
                       .storage = {},
                       .init = Init::constant(weight ? 1.0 : 0.0),
                       .decay = false,
                       .fused = false});
    }
    return specs;
  }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    const auto buffer = [&](const char* name, DType dtype, int64_t rows, int64_t cols) {
      return memory.allocate(MemoryClass::kAttention, name, dtype, {rows, cols});
    };
    auto saved = std::make_unique<RebasedSaved>();
    saved->qkv_TN = buffer("qkv", memory.compute_dtype(), tokens, projected());
    if (kernel_.any()) {
      saved->norm_T2Hf = buffer("qk normed", memory.compute_dtype(), tokens, 2 * features_);
    }
    saved->den_HT = buffer("denominators", DType::kF32, model_.heads, tokens);
    return saved;
  }

  bool reads_fp8(const Stream& s, int64_t tokens) const override { return qkv_.in_fp8(s, tokens); }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<RebasedSaved&>(saved);
    qkv_.forward(s, mine.qkv_TN, x_TD, w, Linear::ForwardOptions{.amax_1 = mine.x_amax_1});
    if (kernel_.any()) apply_kernel(s, mine.norm_T2Hf, mine.qkv_TN, w);
    ops::run(s, ops::RebasedForward{.o_THe = mix_TD,
                                    .den_HT = mine.den_HT,
                                    .q_THf = query(mine),
                                    .k_THf = key(mine),
                                    .v_THe = value(mine.qkv_TN),
                                    .sequences = sequences,
                                    .params = params_});
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    const auto& mine = static_cast<const RebasedSaved&>(saved);
    const Buffer dqkv = s.scratch("dqkv", s.memory().compute_dtype(), {x_TD.rows(), projected()});
    const Tensor dq = first(dqkv);
    const Tensor dk = second(dqkv);
    ops::run(s, ops::RebasedBackward{.dq_THf = dq,
                                     .dk_THf = dk,
                                     .dv_THe = value(dqkv),
                                     .do_THe = dmix_TD,
                                     .o_THe = mix_TD,
                                     .den_HT = mine.den_HT,
                                     .q_THf = query(mine),
                                     .k_THf = key(mine),
                                     .v_THe = value(mine.qkv_TN),
                                     .sequences = sequences,
                                     .params = params_});
    kernel_backward(s, dq, first(mine.qkv_TN), dw, w, kQNormWeight, kQNormBias);
    kernel_backward(s, dk, second(mine.qkv_TN), dw, w, kKNormWeight, kKNormBias);
    qkv_.backward(s, dx_TD, dw, dqkv, x_TD, w, Linear::BackwardOptions{.x_amax_1 = mine.x_amax_1});
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t /*capacity*/) const override {
    auto cache = std::make_unique<RebasedCache>();
    cache->state = memory.allocate(MemoryClass::kAttention, "attention state", DType::kF32,
                                   {sequences, state_rows_, model_.head_width() + 1});
    return cache;
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const auto& from = static_cast<const RebasedSaved&>(saved);
    const Tensor& states = static_cast<RebasedCache&>(cache).state;
    const Tensor state = states.row_range(b, 1).reshaped({states.shape[1], states.shape[2]});
    ops::run(
        s,
        ops::RebasedState{
            .state_Re = state, .k_THf = key(from), .v_THe = value(from.qkv_TN), .params = params_});
  }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    const Tensor& states = static_cast<RebasedCache&>(cache).state;
    const Buffer qkv = s.scratch("qkv", s.memory().compute_dtype(), {x_BD.rows(), projected()});
    qkv_.forward(s, qkv, x_BD, w);
    if (kernel_.any()) apply_kernel(s, qkv.tensor().col_range(0, 2 * features_), qkv, w);
    ops::run(s, ops::RebasedDecode{.o_BHe = mix_BD,
                                   .q_BHf = first(qkv),
                                   .k_BHf = second(qkv),
                                   .v_BHe = value(qkv),
                                   .state_BRe = states.row_range(0, x_BD.rows()),
                                   .positions_B = step.positions_B,
                                   .params = params_});
  }

  AttentionMap map(Stream& s, const Weights& /*w*/, const AttentionSaved& saved,
                   const Sequences& /*sequences*/, int64_t head) const override {
    const auto& mine = static_cast<const RebasedSaved&>(saved);
    return make_map(mine.qkv_TN.tensor().rows(),
                    rebased_weights(download_head(s, query(mine), model_.heads, head),
                                    download_head(s, key(mine), model_.heads, head), params_));
  }

  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t /*max_seqlen*/) const override {
    const int64_t heads = model_.heads;
    const int64_t f = features_ / heads;
    HostMatrix q = project_part(x_TD, w, "q");
    HostMatrix k = project_part(x_TD, w, "k");
    apply_kernel(q, w, kQNormWeight, kQNormBias);
    apply_kernel(k, w, kKNormWeight, kKNormBias);
    const HostMatrix v = project_part(x_TD, w, "v");
    HostMatrix o(x_TD.rows, values_);
    for (int64_t h = 0; h < heads; ++h) {
      mix_head(o, heads, h, v, rebased_weights(q.columns(h * f, f), k.columns(h * f, f), params_));
    }
    return o;
  }

  // The chunked form reads and updates the state, and sees at most a chunk of keys.
  double flops_per_token(double keys) const override {
    const double pair = 2.0 * static_cast<double>(features_ + values_ + model_.heads);
    const double state = 4.0 * static_cast<double>(state_rows_ * (model_.head_width() + 1));
    return params_.quadratic ? pair * keys : pair * std::min(keys, 32.0) + state;
  }

 private:
  int64_t projected() const { return 2 * features_ + values_; }
  Tensor first(const Tensor& qk) const { return qk.col_range(0, features_); }
  Tensor second(const Tensor& qk) const { return qk.col_range(features_, features_); }
  Tensor value(const Tensor& qkv) const { return qkv.col_range(2 * features_, values_); }
  Tensor query(const RebasedSaved& saved) const {
    return first(kernel_.any() ? saved.norm_T2Hf : saved.qkv_TN);
  }
  Tensor key(const RebasedSaved& saved) const {
    return second(kernel_.any() ? saved.norm_T2Hf : saved.qkv_TN);
  }

  void apply_kernel(Stream& s, const Tensor& to_T2Hf, const Tensor& qkv, const Weights& w) const {
    apply_kernel(s, first(to_T2Hf), first(qkv), w, kQNormWeight, kQNormBias);
    apply_kernel(s, second(to_T2Hf), second(qkv), w, kKNormWeight, kKNormBias);
  }
  // y may be x.
  void apply_kernel(Stream& s, const Tensor& y, const Tensor& x, const Weights& w,
                    const char* gamma, const char* beta) const {
    if (kernel_.norm) {
      const Row scale = row(s, kernel_.gamma, w, gamma, 1.0f);
      const Row shift = row(s, kernel_.beta, w, beta, 0.0f);
      ops::run(s, ops::LayerNorm{
                      .y_TD = y, .x_TD = x, .w_D = scale.row, .b_D = shift.row, .eps = kNormEps});
      return;
    }
    if (kernel_.gamma) {
      ops::run(s, ops::Scale{.y_TD = y, .x_TD = x, .w_D = w.at(gamma)});
    } else if (y.data != x.data) {
      ops::run(s, ops::Copy{.y = y, .x = x});
    }
    if (kernel_.beta) ops::run(s, ops::AddBias{.y_TN = y, .b_N = w.at(beta)});
  }
  void apply_kernel(HostMatrix& x, const HostWeights& w, const char* gamma,
                    const char* beta) const {
    HostMatrix ones(1, x.cols);
    std::fill(ones.values.begin(), ones.values.end(), 1.0);
    const HostMatrix zeros(1, x.cols);
    const HostMatrix& scale = kernel_.gamma ? at(w, gamma) : ones;
    const HostMatrix& shift = kernel_.beta ? at(w, beta) : zeros;
    if (kernel_.norm) return layer_norm(x, scale, shift, kNormEps, 1);
    for (int64_t t = 0; t < x.rows; ++t) {
      for (int64_t i = 0; i < x.cols; ++i) {
        x.row(t)[i] = x.row(t)[i] * scale.values[i] + shift.values[i];
      }
    }
  }
  // dx, the gradient of what apply_kernel() gives, becomes that of its input x.
  void kernel_backward(Stream& s, const Tensor& dx, const Tensor& x, const Weights& dw,
                       const Weights& w, const char* gamma, const char* beta) const {
    if (kernel_.norm) {
      const Row scale = row(s, kernel_.gamma, w, gamma, 1.0f);
      const Row dscale = gradient_row(s, kernel_.gamma, dw, gamma);
      const Row dshift = gradient_row(s, kernel_.beta, dw, beta);
      ops::run(s, ops::LayerNormBackward{.dx_TD = dx,
                                         .dw_D = dscale.row,
                                         .db_D = dshift.row,
                                         .dy_TD = dx,
                                         .x_TD = x,
                                         .w_D = scale.row,
                                         .eps = kNormEps,
                                         .accumulate = false});
      return;
    }
    if (kernel_.beta) ops::run(s, ops::BiasBackward{.db_N = dw.at(beta), .dy_TN = dx});
    if (!kernel_.gamma) return;
    ops::run(s, ops::ScaleBackward{
                    .dx_TD = dx, .dw_D = dw.at(gamma), .dy_TD = dx, .x_TD = x, .w_D = w.at(gamma)});
  }

  // A weight, or where the model has none, a constant in scratch of its own.
  struct Row {
    Buffer scratch;
    Tensor row;
  };
  Row row(Stream& s, bool learned, const Weights& w, const char* name, float constant) const {
    if (learned) return {.scratch = {}, .row = w.at(name)};
    Row made{.scratch = s.scratch(name, s.memory().compute_dtype(), {features_}), .row = {}};
    made.row = made.scratch;
    ops::run(s, ops::Fill{.x = made.row, .value = constant});
    return made;
  }
  // Its gradient, or where the model has no such weight, scratch that nothing reads.
  Row gradient_row(Stream& s, bool learned, const Weights& dw, const char* name) const {
    if (learned) return {.scratch = {}, .row = dw.at(name)};
    Row made{.scratch = s.scratch(name, DType::kF32, {features_}), .row = {}};
    made.row = made.scratch;
    ops::run(s, ops::Fill{.x = made.row, .value = 0.0f});
    return made;
  }

  AttentionShape model_;
  Kernel kernel_;
  int64_t features_, values_;  // of all heads
  Linear qkv_;
  int64_t state_rows_ = 0;
  ops::RebasedParams params_;
};

}  // namespace

void register_rebased(AttentionRegistry& registry) {
  registry.add<Options>({.name = "based",
                         .whole_heads = false,
                         .own_head_dim = true,
                         .make = make_module<RebasedAttention, Options>,
                         .bench = {{.name = "based", .options = {{"form", "chunked"}}}}});
  registry.add<RebasedOptions>({.name = "rebased",
                                .whole_heads = false,
                                .own_head_dim = true,
                                .make = make_module<RebasedAttention, RebasedOptions>,
                                .bench = {{.name = "rebased", .options = {{"form", "chunked"}}}}});
}

}  // namespace sbtrain
