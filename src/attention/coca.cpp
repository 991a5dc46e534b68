// `coca`: collinear constrained attention (arXiv 2309.08646). Queries and keys are transformed so
// that the rest is softmax attention; t_proj takes the place of k_proj.

#include "ops/coca.h"

#include "attention/map.h"
#include "attention/projections.h"
#include "attention/registry.h"
#include "attention/rotary.h"
#include "attention/softmax_ring.h"
#include "core/error.h"
#include "ops/attention.h"

namespace sbtrain {

template <>
inline constexpr auto kNames<ops::CocaVariant> = enum_names<ops::CocaVariant>(
    {{ops::CocaVariant::kOfficial, "official"}, {ops::CocaVariant::kStrict, "strict"}});

namespace {

constexpr const char* kKey = "t";  // t_proj, t_norm

struct Options {
  double logit_scale = 0.0;  // 0: 1/sqrt(head_dim)
  int64_t window = 0;        // 0: all
  PositionEncoding position = PositionEncoding::kRope;
  RotaryOptions rotary;
  ops::CocaVariant variant = ops::CocaVariant::kOfficial;
  QkvOptions qkv;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  describe_logit_scale(f, o.logit_scale);
  describe_window(f, o.window);
  f.add("position", o.position, "CoCA is made of rotary positions and takes no others.");
  describe(f, o.rotary);
  describe_rope_fraction(f, o.rotary);
  f.add("variant", o.variant,
        "What the authors' code computes, or the paper's equations 8 and 12.");
  describe(f, o.qkv);
}

std::vector<OptionProblem> check_options(const Options& o, const AttentionShape& model) {
  std::vector<OptionProblem> problems = check(o.rotary, model);
  if (o.position != PositionEncoding::kRope) {
    problems.push_back({"position", "coca rotates its keys, so that it takes rope alone"});
  }
  if (o.rotary.fraction != 1.0) {
    problems.push_back({"rope_fraction", "coca rotates whole heads, so that it takes 1 alone"});
  }
  return problems;
}

struct CocaSaved : AttentionSaved {
  QkvSaved qkv;  // the keys are transformed, the queries are not
  Buffer lse_HT;
  // Keys of other ranks, from begin_backward() on.
  std::unique_ptr<KeyRing> ring;
};

class CocaAttention : public Attention {
 public:
  CocaAttention(const Options& options, const AttentionShape& model)
      : model_(model),
        qkv_(model, options.qkv, kKey),
        variant_(options.variant),
        rotary_(options.rotary, model),
        params_{.heads = static_cast<int>(model.heads),
                .scale = logit_scale(options.logit_scale, model),
                .window = options.window} {
    params_.scale *= static_cast<float>(rotary_.logit_factor());
  }

  std::vector<TensorSpec> parameters() const override { return qkv_.parameters(); }

  int64_t mix_width(int64_t /*model_width*/) const override { return model_.query_width(); }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    auto saved = std::make_unique<CocaSaved>();
    saved->qkv = qkv_.allocate(memory, tokens);
    saved->lse_HT =
        memory.allocate(MemoryClass::kAttention, "lse", DType::kF32, {model_.heads, tokens});
    return saved;
  }

  bool reads_fp8(const Stream& s, int64_t tokens) const override { return qkv_.in_fp8(s, tokens); }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<CocaSaved&>(saved);
    const Tensor& positions_T = sequences.positions_T;
    const ops::CocaParams query_params = coca_params(qkv_.heads(), sequences.rope_length());
    const ops::CocaParams key_params = coca_params(qkv_.key_heads(), sequences.rope_length());
    const Qkv x = qkv_.forward(s, mine.qkv, x_TD, w, /*query_factor=*/1.0f, mine.x_amax_1);
    const Buffer query = query_buffer(s, x_TD.rows());
    ops::run(s,
             ops::CocaQuery{
                 .y_THd = query, .q_THd = x.q, .positions_T = positions_T, .params = query_params});
    ops::run(s, ops::CocaKey{
                    .y_THd = x.k, .t_THd = x.k, .positions_T = positions_T, .params = key_params});
    const std::unique_ptr<KeyRing> ring = key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kForward);
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::SoftmaxForward{.o_THd = own.rows(mix_TD),
                                      .lse_HT = own.per_head(mine.lse_HT),
                                      .q_THd = own.rows(query),
                                      .k_THd = own.rows(x.k),
                                      .v_THd = own.rows(x.v),
                                      .sequences = own.sequences,
                                      .params = params_});
    }
    if (ring) add_far_softmax(s, mix_TD, mine.lse_HT, far_softmax(query, x), *ring);
  }

  void begin_backward(Stream& s, AttentionSaved& saved, const Sequences& sequences) const override {
    auto& mine = static_cast<CocaSaved&>(saved);
    const Qkv x = qkv_.saved(mine.qkv);
    mine.ring = key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kBackward);
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    auto& mine = static_cast<CocaSaved&>(saved);
    const Tensor& positions_T = sequences.positions_T;
    const ops::CocaParams query_params = coca_params(qkv_.heads(), sequences.rope_length());
    const ops::CocaParams key_params = coca_params(qkv_.key_heads(), sequences.rope_length());
    const Buffer dqkv = qkv_.gradients(s, x_TD.rows());
    const Qkv x = qkv_.saved(mine.qkv);
    const Qkv dx = qkv_.view(dqkv);
    {
      const Buffer query = query_buffer(s, x_TD.rows());
      ops::run(
          s, ops::CocaQuery{
                 .y_THd = query, .q_THd = x.q, .positions_T = positions_T, .params = query_params});
      std::optional<FarSoftmaxBackward> far;
      if (mine.ring) {
        far.emplace(s, dmix_TD, mix_TD, mine.lse_HT, far_softmax(query, x), std::move(mine.ring));
      }
      for (const OwnTokens& own : own_tokens(sequences)) {
        ops::run(s, ops::SoftmaxBackward{.dq_THd = own.rows(dx.q),
                                         .dk_THd = own.rows(dx.k),
                                         .dv_THd = own.rows(dx.v),
                                         .do_THd = own.rows(dmix_TD),
                                         .o_THd = own.rows(mix_TD),
                                         .lse_HT = own.per_head(mine.lse_HT),
                                         .q_THd = own.rows(query),
                                         .k_THd = own.rows(x.k),
                                         .v_THd = own.rows(x.v),
                                         .sequences = own.sequences,
                                         .params = params_});
      }
      if (far) far->add_to({dx.q, dx.k, dx.v});
    }
    ops::run(s, ops::CocaQueryBackward{.dq_THd = dx.q,
                                       .dy_THd = dx.q,
                                       .q_THd = x.q,
                                       .positions_T = positions_T,
                                       .params = query_params});
    ops::run(s, ops::CocaKeyBackward{.dt_THd = dx.k,
                                     .dy_THd = dx.k,
                                     .y_THd = x.k,
                                     .positions_T = positions_T,
                                     .params = key_params});
    qkv_.backward(s, dx_TD, dw, dqkv, mine.qkv, x_TD, w, mine.x_amax_1);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t capacity) const override {
    return std::make_unique<KeyValueCache>(memory, sequences, capacity, model_.key_width());
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const Qkv x = qkv_.saved(static_cast<const CocaSaved&>(saved).qkv);
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
    ops::run(s, ops::CocaQuery{.y_THd = x.q,
                               .q_THd = x.q,
                               .positions_T = step.positions_B,
                               .params = coca_params(qkv_.heads(), mine.k.capacity()),
                               .lengths_T = rotary_.lengths(step)});
    ops::run(s, ops::CocaKey{.y_THd = x.k,
                             .t_THd = x.k,
                             .positions_T = step.positions_B,
                             .params = coca_params(qkv_.key_heads(), mine.k.capacity()),
                             .lengths_T = rotary_.lengths(step)});
    ops::run(s, ops::SoftmaxDecode{.o_BHd = mix_BD,
                                   .q_BHd = x.q,
                                   .k_BGd = x.k,
                                   .v_BGd = x.v,
                                   .k_cache_BCGd = mine.k.first(sequences),
                                   .v_cache_BCGd = mine.v.first(sequences),
                                   .lengths_B = step.lengths_B,
                                   .params = params_});
  }

  AttentionMap map(Stream& s, const Weights& /*w*/, const AttentionSaved& saved,
                   const Sequences& sequences, int64_t head) const override {
    const Qkv x = qkv_.saved(static_cast<const CocaSaved&>(saved).qkv);
    const Buffer query = query_buffer(s, x.q.rows());
    ops::run(s, ops::CocaQuery{.y_THd = query,
                               .q_THd = x.q,
                               .positions_T = sequences.positions_T,
                               .params = coca_params(qkv_.heads(), sequences.rope_length())});
    const int64_t heads = model_.heads;
    return make_map(x.q.rows(),
                    softmax_weights(download_head(s, query, heads, head),
                                    download_head(s, x.k, qkv_.key_heads(), qkv_.key_head(head)),
                                    params_, no_bias()));
  }

  // Equations 8 and 12 of the paper, or what the authors' code computes (ops/coca.h).
  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t max_seqlen) const override {
    const ops::RopeParams rope = rotary_.params(model_.heads, max_seqlen);
    const bool strict = variant_ == ops::CocaVariant::kStrict;
    const int64_t heads = model_.heads;
    const int64_t half = model_.head_width() / 2;
    const HostQkv x = qkv_.reference(x_TD, w);
    const HostMatrix& q = x.q;
    const HostMatrix& t = x.k;
    HostMatrix rotated = q;
    rotate(rotated, rope);
    HostMatrix query(x_TD.rows, model_.query_width());
    HostMatrix key(x_TD.rows, model_.query_width());
    for (int64_t j = 0; j < x_TD.rows; ++j) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t a = 2 * h * half; a < (2 * h + 1) * half; ++a) {
          const int64_t b = a + half;  // the other half of the pair
          const double square = q.row(j)[a] * q.row(j)[a] + q.row(j)[b] * q.row(j)[b];
          query.row(j)[a] = strict ? square : q.row(j)[a] * rotated.row(j)[a];
          query.row(j)[b] = strict ? 0.0 : q.row(j)[b] * rotated.row(j)[b];
          const double mean = std::max((t.row(j)[a] + t.row(j)[b]) / 2, 0.0);
          key.row(j)[a] = mean;
          key.row(j)[b] = strict ? 0.0 : mean;
        }
      }
    }
    if (strict) rotate(query, rope);
    rotate(key, rope);
    HostMatrix o(x_TD.rows, model_.query_width());
    for (int64_t h = 0; h < heads; ++h) {
      mix_head(o, heads, h, x.v,
               softmax_weights(query.columns(2 * h * half, 2 * half),
                               key.columns(2 * h * half, 2 * half), params_, no_bias()));
    }
    return o;
  }

  double seen_keys(double keys) const override { return keys_in_window(keys, params_.window); }

  double flops_per_token(double keys) const override {
    return 4.0 * static_cast<double>(model_.query_width()) * seen_keys(keys);
  }

 private:
  FarSoftmax far_softmax(const Tensor& query, const Qkv& x) const {
    return {.q_THd = query, .k_THd = x.k, .v_THd = x.v, .params = params_};
  }

  ops::CocaParams coca_params(int64_t heads, int64_t length) const {
    return {.rope = rotary_.params(heads, length), .variant = variant_};
  }

  Buffer query_buffer(const Stream& s, int64_t tokens) const {
    return s.scratch("coca query", s.memory().compute_dtype(), {tokens, model_.query_width()});
  }

  AttentionShape model_;
  QkvProjection qkv_;
  ops::CocaVariant variant_;
  Rotary rotary_;
  ops::SoftmaxParams params_;
};

}  // namespace

void register_coca(AttentionRegistry& registry) {
  registry.add<Options>({.name = "coca",
                         .grouped_heads = true,
                         .own_head_dim = true,
                         .make = make_module<CocaAttention, Options>,
                         .check = check_options,
                         .context_problem = [](const Options&) { return std::string(); },
                         .rotary = [](Options& o) { return &o.rotary; }});
}

}  // namespace sbtrain
