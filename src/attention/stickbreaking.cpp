// `stickbreaking`: stick-breaking attention (arXiv 2410.17980), which needs no positions, with its
// options: what becomes of the remainder, head norm, attending to the token itself, a forget gate.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "attention/context.h"
#include "attention/kept_keys.h"
#include "attention/map.h"
#include "attention/projections.h"
#include "attention/registry.h"
#include "core/error.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/kept_keys.h"
#include "ops/linear.h"
#include "ops/memory.h"
#include "ops/norm.h"

namespace sbtrain {

template <>
inline constexpr auto kNames<ops::Remainder> =
    enum_names<ops::Remainder>({{ops::Remainder::kNone, "none"},
                                {ops::Remainder::kValue, "value"},
                                {ops::Remainder::kBias, "bias"}});

namespace {

struct Options {
  double logit_scale = 0.0;  // 0: 1/sqrt(head_dim)
  ops::Remainder remainder = ops::Remainder::kNone;
  bool head_norm = false;
  bool attend_current = false;
  bool forget_gate = false;
  double gate_penalty = 0.0;
  double skip_epsilon = 0x1p-24;
  QkvOptions qkv;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  describe_logit_scale(f, o.logit_scale);
  f.add("remainder", o.remainder,
        "What receives the part of the stick that is left over: nothing, the token's own value, "
        "or a learned vector of each head.");
  f.add("head_norm", o.head_norm, "Normalise each head's output (mean and variance, affine).");
  f.add("attend_current", o.attend_current,
        "A token attends to itself as well; otherwise only to those before it.");
  f.add("forget_gate", o.forget_gate, "A learned gate of each key and head scales its attention.");
  f.add(
      "gate_penalty", o.gate_penalty, at_least(0).when("forget_gate", {"true"}).with_example(0.1),
      "Weight of an auxiliary loss of training, the mean of a token's gates over the heads of this "
      "layer, which pushes gates down. The loss that is shown does not hold it. The form is ours: "
      "the slides of the paper name such a loss and give no formula.");
  f.add("skip_epsilon", o.skip_epsilon, from_to_below(0, 1),
        "Earlier keys are skipped once every row of a tile has less than this left of its stick; "
        "0 turns skipping off.");
  describe(f, o.qkv);
}

std::optional<FlaAttention> in_fla(const Options& o) {
  FlaAttention attention{.logit_scale = o.logit_scale,
                         .qkv_bias = o.qkv.qkv_bias,
                         .qk_norm = o.qkv.qk_norm,
                         .attend_current = o.attend_current};
  if (o.remainder != ops::Remainder::kNone) {
    attention.lacks.emplace_back("it gives the remainder to nothing");
  }
  if (o.head_norm) attention.lacks.emplace_back("it has no head_norm");
  if (o.qkv.joint_norm()) attention.lacks.emplace_back("its qk_norm is that of each head");
  if (o.forget_gate) attention.lacks.emplace_back("it has no forget_gate");
  return attention;
}

constexpr const char* kRemainderBias = "self_attn.remainder_bias";
constexpr const char* kHeadNormWeight = "self_attn.head_norm.weight";
constexpr const char* kHeadNormBias = "self_attn.head_norm.bias";
constexpr const char* kGateWeight = "self_attn.forget_gate.weight";
constexpr const char* kGateBias = "self_attn.forget_gate.bias";
constexpr float kHeadNormEps = 1e-5f;
constexpr double kGateBiasInit = 4.0;  // sigmoid(4) = 0.98: gates start almost open

std::vector<int32_t> download_integers(Stream& s, const Tensor& x) {
  std::vector<int32_t> values(static_cast<size_t>(x.numel()));
  ops::run(s, ops::CopyToHost{.host = values.data(), .x = x});
  return values;
}

struct StickBreakingSaved : AttentionSaved {
  QkvSaved qkv;
  Buffer log2_rem_HT;
  Buffer stop_HT;
  Buffer gate_TH;   // f32, with a forget gate: most are near 1, where bf16 is coarse
  Buffer heads_TD;  // the output before head norm, with head norm
  // Where ranks share sequences, what the keys of each visit (attention/context.h) leave and where
  // they stop, [visits, H, T / chunks].
  Buffer far_log2_rem, far_stop;
  // Keys of other ranks, from begin_backward() on.
  std::unique_ptr<KeyRing> ring;
  static Tensor of_visit(const Tensor& all, int64_t visit) {
    const int64_t heads = all.shape[1];
    const int64_t tokens = all.shape[2];
    return all.reshaped({all.shape[0] * heads, tokens}).row_range(visit * heads, heads);
  }
};

struct StickBreakingCache : KeyValueCache {
  using KeyValueCache::KeyValueCache;
  std::unique_ptr<TokenCache> gate;  // with a forget gate
};

class StickBreakingAttention : public Attention {
 public:
  StickBreakingAttention(const Options& options, const AttentionShape& model)
      : model_(model),
        qkv_(model, options.qkv),
        head_norm_(options.head_norm),
        gated_(options.forget_gate),
        gate_penalty_(static_cast<float>(options.gate_penalty)),
        params_{.heads = static_cast<int>(model.heads),
                .scale = logit_scale(options.logit_scale, model),
                .attend_current = options.attend_current,
                .remainder = options.remainder,
                .skip_epsilon = static_cast<float>(options.skip_epsilon)} {}

  std::vector<TensorSpec> parameters() const override {
    std::vector<TensorSpec> specs = qkv_.parameters();
    const auto add = [&](const char* name, std::vector<int64_t> shape, double value) {
      specs.push_back({.name = name,
                       .shape = std::move(shape),
                       .storage = {},
                       .init = Init::constant(value),
                       .decay = false,
                       .fused = false});
    };
    if (has_bias()) {
      add(kRemainderBias, {model_.heads, model_.head_width()}, 0.0);
    }
    if (gated_) forget_gate_.add_parameters(specs);
    if (head_norm_) {
      add(kHeadNormWeight, {model_.query_width()}, 1.0);
      add(kHeadNormBias, {model_.query_width()}, 0.0);
    }
    return specs;
  }

  int64_t mix_width(int64_t /*model_width*/) const override { return model_.query_width(); }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    const auto buffer = [&](const char* name, DType dtype, int64_t rows, int64_t cols) {
      return memory.allocate(MemoryClass::kAttention, name, dtype, {rows, cols});
    };
    auto saved = std::make_unique<StickBreakingSaved>();
    saved->qkv = qkv_.allocate(memory, tokens);
    saved->log2_rem_HT = buffer("remainder", DType::kF32, model_.heads, tokens);
    saved->stop_HT = buffer("stops", DType::kI32, model_.heads, tokens);
    if (gated_) saved->gate_TH = buffer("forget gate", DType::kF32, tokens, model_.heads);
    if (head_norm_)
      saved->heads_TD = buffer("heads", memory.compute_dtype(), tokens, model_.query_width());
    return saved;
  }

  bool reads_fp8(const Stream& s, int64_t tokens) const override { return qkv_.in_fp8(s, tokens); }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<StickBreakingSaved&>(saved);
    const Tensor heads_TD = head_norm_ ? mine.heads_TD.tensor() : mix_TD;
    const ops::StickBreakingParams params = params_of(s, x_TD.rows());
    const Qkv x = qkv_.forward(s, mine.qkv, x_TD, w, params.query_factor, mine.x_amax_1);
    if (gated_) compute_gate(s, mine.gate_TH, x_TD, w);
    const std::unique_ptr<KeyRing> ring =
        key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kForward, mine.gate_TH);
    const ops::StickBreakingParams own_params = ring ? without_remainder(params) : params;
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::StickBreakingForward{.o_THd = own.rows(heads_TD),
                                            .log2_rem_HT = own.per_head(mine.log2_rem_HT),
                                            .stop_HT = own.per_head(mine.stop_HT),
                                            .q_THd = own.rows(x.q),
                                            .k_THd = own.rows(x.k),
                                            .v_THd = own.rows(x.v),
                                            .gate_TH = own.rows(mine.gate_TH),
                                            .remainder_bias_Hd = remainder_bias(w),
                                            .sequences = own.sequences,
                                            .params = own_params});
    }
    if (ring) add_far_keys(s, heads_TD, x, w, mine, *ring, sequences);
    if (head_norm_) normalise(s, mix_TD, heads_TD, w);
  }

  void begin_backward(Stream& s, AttentionSaved& saved, const Sequences& sequences) const override {
    auto& mine = static_cast<StickBreakingSaved&>(saved);
    const Qkv x = qkv_.saved(mine.qkv);
    mine.ring = key_ring(s, sequences, x.k, x.v, KeyRing::Pass::kBackward, mine.gate_TH);
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    auto& mine = static_cast<StickBreakingSaved&>(saved);
    const int64_t tokens = x_TD.rows();
    const Qkv x = qkv_.saved(mine.qkv);
    std::unique_ptr<KeyRing> ring = std::move(mine.ring);
    Buffer dheads;
    Tensor dheads_TD = dmix_TD;
    if (head_norm_) {
      dheads = s.scratch("dheads", s.memory().compute_dtype(), {tokens, model_.query_width()});
      dheads_TD = dheads;
      ops::run(s, ops::HeadNormBackward{.dx_THd = dheads_TD,
                                        .dw_Hd = dw.at(kHeadNormWeight),
                                        .db_Hd = dw.at(kHeadNormBias),
                                        .dy_THd = dmix_TD,
                                        .x_THd = mine.heads_TD,
                                        .w_Hd = w.at(kHeadNormWeight),
                                        .heads = params_.heads,
                                        .eps = kHeadNormEps});
    }
    const Buffer dqkv = qkv_.gradients(s, tokens);
    Buffer dgate;
    if (gated_) dgate = s.scratch("dgate", s.memory().compute_dtype(), {tokens, model_.heads});
    const Qkv dx = qkv_.view(dqkv);
    ops::StickBreakingParams params = params_of(s, tokens);
    FarGradients far;
    if (ring) {
      far = far_backward(s, dheads_TD, x, w, mine, *ring, sequences);
      params = without_remainder(params);
    }
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::StickBreakingBackward{.dq_THd = own.rows(dx.q),
                                             .dk_THd = own.rows(dx.k),
                                             .dv_THd = own.rows(dx.v),
                                             .dgate_TH = own.rows(dgate),
                                             .dremainder_bias_Hd = remainder_bias(dw),
                                             .do_THd = own.rows(dheads_TD),
                                             .drem_HT = own.per_head(far.w_HT),
                                             .log2_rem_HT = own.per_head(mine.log2_rem_HT),
                                             .stop_HT = own.per_head(mine.stop_HT),
                                             .q_THd = own.rows(x.q),
                                             .k_THd = own.rows(x.k),
                                             .v_THd = own.rows(x.v),
                                             .gate_TH = own.rows(mine.gate_TH),
                                             .remainder_bias_Hd = remainder_bias(w),
                                             .sequences = own.sequences,
                                             .params = params});
    }
    if (ring) {
      const KeyRing::Home home = ring->home();
      give_remainder_gradients(s, dheads_TD, home.dv, dw, mine, sequences);
      ops::run(s, ops::Add{.y = dx.q, .x = far.dq_THd});
      ops::run(s, ops::Add{.y = dx.k, .x = home.dk});
      ops::run(s, ops::Add{.y = dx.v, .x = home.dv});
      if (gated_) ops::run(s, ops::Add{.y = dgate, .x = home.dgate});
      far = {};
      ring.reset();
    }
    qkv_.backward(s, dx_TD, dw, dqkv, mine.qkv, x_TD, w, mine.x_amax_1);
    if (gated_) gate_backward(s, dx_TD, dw, dgate, mine.gate_TH, x_TD, w);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t capacity) const override {
    auto cache =
        std::make_unique<StickBreakingCache>(memory, sequences, capacity, model_.key_width());
    if (gated_) {
      cache->gate = std::make_unique<TokenCache>(memory, "gate cache", DType::kF32, sequences,
                                                 capacity, model_.heads);
    }
    return cache;
  }

  bool drops_keys() const override { return gated_; }
  std::unique_ptr<AttentionCache> dropping_cache(KeptKeys& keys, int64_t layer) const override {
    if (!gated_) return nullptr;
    return std::make_unique<KeptKeysCache>(keys, layer);
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const auto& from = static_cast<const StickBreakingSaved&>(saved);
    const Qkv x = qkv_.saved(from.qkv);
    if (auto* kept = dynamic_cast<KeptKeysCache*>(&cache)) {
      kept->keys.store(s, kept->layer, b, x.k, x.v, from.gate_TH);
      return;
    }
    auto& mine = static_cast<StickBreakingCache&>(cache);
    mine.k.prefill(s, b, x.k);
    mine.v.prefill(s, b, x.v);
    if (gated_) mine.gate->prefill(s, b, from.gate_TH);
  }

  // The forget gate takes x as well.
  bool norms_input() const override { return !gated_; }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    const int64_t sequences = x_BD.rows();
    const QkvSaved qkv = qkv_.scratch(s, sequences);
    const Qkv x = qkv_.decode(s, qkv, x_BD, w, step.norm);
    Buffer gate;
    if (gated_) {
      gate = s.scratch("forget gate", DType::kF32, {sequences, model_.heads});
      compute_gate(s, gate, x_BD, w);
    }
    Buffer heads;
    if (head_norm_)
      heads = s.scratch("heads", s.memory().compute_dtype(), {sequences, model_.query_width()});
    const Tensor heads_BD = head_norm_ ? heads.tensor() : mix_BD;
    if (auto* kept = dynamic_cast<KeptKeysCache*>(&cache)) {
      attend_kept(s, heads_BD, x, gate, w, *kept, step);
    } else {
      attend_all(s, heads_BD, x, gate, w, static_cast<StickBreakingCache&>(cache), step);
    }
    if (head_norm_) normalise(s, mix_BD, heads_BD, w);
  }

  AttentionMap map(Stream& s, const Weights& /*w*/, const AttentionSaved& saved,
                   const Sequences& /*sequences*/, int64_t head) const override {
    const auto& mine = static_cast<const StickBreakingSaved&>(saved);
    const Qkv x = qkv_.saved(mine.qkv);
    const int64_t heads = model_.heads;
    HostMatrix gate;
    if (gated_) gate = download_head(s, mine.gate_TH, heads, head);
    const FillWeights weights =
        stickbreaking_weights(download_head(s, x.q, heads, head),
                              download_head(s, x.k, qkv_.key_heads(), qkv_.key_head(head)),
                              std::move(gate), params_of(s, x.q.rows()));
    return make_map(x.q.rows(), weights, /*with_remainder=*/true);
  }

  // The keys of a token at position p are 0 .. p - 1, with attend_current 0 .. p, and those from
  // its tile's stop on have been read.
  std::vector<KeysRead> keys_read_by_head(Stream& s, const AttentionSaved& saved,
                                          const Sequences& sequences) const override {
    const auto& mine = static_cast<const StickBreakingSaved&>(saved);
    const std::vector<int32_t> stop_HT = download_integers(s, mine.stop_HT);
    const std::vector<int32_t> positions_T = download_integers(s, sequences.positions_T);
    const size_t tokens = positions_T.size();
    std::vector<KeysRead> heads(static_cast<size_t>(model_.heads));
    for (size_t h = 0; h < heads.size(); ++h) {
      for (size_t t = 0; t < tokens; ++t) {
        const int64_t visible = positions_T[t] + (params_.attend_current ? 1 : 0);
        const int64_t read = std::max<int64_t>(0, visible - stop_HT[h * tokens + t]);
        heads[h].read += read;
        heads[h].visible += visible;
        if (read == 0) continue;
        const auto eighths = static_cast<int64_t>(heads[h].beyond.size());
        const int64_t farthest = positions_T[t] - stop_HT[h * tokens + t];
        for (int64_t n = 0; n < eighths && eighths * farthest > n * sequences.max_seqlen; ++n) {
          ++heads[h].beyond[static_cast<size_t>(n)];
        }
      }
    }
    return heads;
  }

  double auxiliary_loss(const HostMatrix& x_TD, const HostWeights& w) const override {
    if (!gated_) return 0;
    double sum = 0;
    for (const double f : reference_gate(x_TD, w).values) sum += f;
    return static_cast<double>(gate_penalty_) * sum / static_cast<double>(model_.heads);
  }

  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t /*max_seqlen*/) const override {
    const HostQkv x = qkv_.reference(x_TD, w);
    const int64_t heads = model_.heads;
    const int64_t d = model_.head_width();
    const HostMatrix gate_TH = gated_ ? reference_gate(x_TD, w) : HostMatrix();
    HostMatrix o(x_TD.rows, model_.query_width());
    for (int64_t h = 0; h < heads; ++h) {
      const FillWeights weights =
          stickbreaking_weights(x.q_head(heads, h), x.k_head(heads, h),
                                gated_ ? gate_TH.columns(h, 1) : HostMatrix(), params_);
      mix_head(o, heads, h, x.v, [&](int64_t j, std::vector<double>& row) {
        const double left = weights(j, row);
        for (int64_t c = h * d; c < (h + 1) * d; ++c) {
          if (params_.remainder == ops::Remainder::kValue) o.row(j)[c] += left * x.v.row(j)[c];
          if (has_bias()) o.row(j)[c] += left * at(w, kRemainderBias).values[c];
        }
        return left;
      });
    }
    if (head_norm_)
      layer_norm(o, at(w, kHeadNormWeight), at(w, kHeadNormBias), kHeadNormEps, heads);
    return o;
  }

  double flops_per_token(double keys) const override {
    return 4.0 * static_cast<double>(model_.query_width()) * keys;
  }

 private:
  // New tokens attend to all keys, or to those that were kept.
  void attend_all(Stream& s, const Tensor& o_BHd, const Qkv& x, const Buffer& gate,
                  const Weights& w, StickBreakingCache& cache, const DecodeStep& step) const {
    const int64_t sequences = o_BHd.rows();
    if (gated_) cache.gate->append(s, gate, step);
    ops::run(s, ops::StickBreakingDecode{
                    .o_BHd = o_BHd,
                    .q_BHd = x.q,
                    .k_BGd = x.k,
                    .v_BGd = x.v,
                    .k_cache_BCGd = cache.k.first(sequences),
                    .v_cache_BCGd = cache.v.first(sequences),
                    .gate_cache_BCH = gated_ ? cache.gate->first(sequences) : Tensor(),
                    .remainder_bias_Hd = remainder_bias(w),
                    .lengths_B = step.lengths_B,
                    .params = params_});
  }
  void attend_kept(Stream& s, const Tensor& o_BHd, const Qkv& x, const Buffer& gate,
                   const Weights& w, const KeptKeysCache& cache, const DecodeStep& step) const {
    const int64_t sequences = o_BHd.rows();
    const KeptKeys& keys = cache.keys;
    const Tensor pages_BGM = keys.pages(cache.layer, sequences);
    const Buffer lengths_BG = s.scratch("kept keys", DType::kI32, {sequences, model_.key_heads()});
    ops::run(s, ops::PlaceKeys{.counts_BG = keys.counts(cache.layer, sequences),
                               .lengths_BG = lengths_BG,
                               .pages_BGM = pages_BGM,
                               .gate_BH = gate,
                               .positions_B = step.positions_B,
                               .bound = keys.bound(),
                               .head_dim = static_cast<int>(model_.head_width())});
    ops::run(s, ops::StickBreakingKeptDecode{.o_BHd = o_BHd,
                                             .q_BHd = x.q,
                                             .k_BGd = x.k,
                                             .v_BGd = x.v,
                                             .pages_BGM = pages_BGM,
                                             .remainder_bias_Hd = remainder_bias(w),
                                             .lengths_BG = lengths_BG,
                                             .params = params_});
  }

  // Adds the keys of earlier chunks to the output of the chunks' own, the nearest first, and what
  // the remainder gives.
  void add_far_keys(Stream& s, const Tensor& o_THd, const Qkv& x, const Weights& w,
                    StickBreakingSaved& saved, KeyRing& ring, const Sequences& sequences) const {
    const Tensor& q_THd = x.q;
    const ContextShare& share = *sequences.context;
    const auto buffer = [&](const char* name, DType dtype) {
      return s.memory().allocate(MemoryClass::kAttention, name, dtype,
                                 {KeyRing::visits(share), model_.heads, share.chunk_tokens()});
    };
    saved.far_log2_rem = buffer("remainders after other chunks", DType::kF32);
    saved.far_stop = buffer("stops in other chunks", DType::kI32);
    // Sums are f32.
    Buffer sums;
    if (o_THd.dtype != DType::kF32) {
      sums = s.scratch("o of other chunks", DType::kF32, {q_THd.rows(), q_THd.cols()});
      ops::run(s, ops::Fill{.x = sums, .value = 0.0f});
    }
    const bool apart = sums.tensor().defined();
    const Tensor sum_THd = apart ? sums.tensor() : o_THd;
    while (ring.next()) {
      const OwnTokens own = ring.own();
      ops::run(s, ops::StickBreakingFarForward{
                      .o_THd = own.rows(sum_THd),
                      .log2_rem_HT = StickBreakingSaved::of_visit(saved.far_log2_rem, ring.index()),
                      .stop_HT = StickBreakingSaved::of_visit(saved.far_stop, ring.index()),
                      .before_HT = before_visit(saved, ring),
                      .q_THd = own.rows(q_THd),
                      .k_THd = ring.k(),
                      .v_THd = ring.v(),
                      .gate_TH = ring.gate(),
                      .far = ring.keys(),
                      .params = without_remainder(params_of(s, q_THd.rows()))});
    }
    if (has_remainder()) {
      const Buffer left_HT = left_by_all(s, saved, sequences);
      for (const OwnTokens& own : own_tokens(sequences)) {
        ops::run(s, ops::AddRemainder{.o_THd = own.rows(sum_THd),
                                      .log2_rem_HT = own.per_head(left_HT),
                                      .v_THd = own.rows(x.v),
                                      .remainder_bias_Hd = remainder_bias(w),
                                      .params = params_});
      }
    }
    if (apart) ops::run(s, ops::Add{.y = o_THd, .x = sums});
  }

  // What nearer keys have left where the keys of a visit come.
  static Tensor before_visit(const StickBreakingSaved& saved, const KeyRing& ring) {
    if (ring.nearest()) return ring.own().per_head(saved.log2_rem_HT);
    return StickBreakingSaved::of_visit(saved.far_log2_rem, ring.index() - 1);
  }

  // log2 of what the keys of all chunks have left, [H, T], chunk after chunk.
  Buffer left_by_all(Stream& s, const StickBreakingSaved& saved, const Sequences& sequences) const {
    const Tensor& nearest = saved.log2_rem_HT;
    Buffer left_HT =
        s.scratch("remainders after all chunks", DType::kF32, {nearest.rows(), nearest.cols()});
    ops::run(s, ops::Copy{.y = left_HT, .x = nearest});
    const ContextShare& share = *sequences.context;
    for (const OwnTokens& own : own_tokens(sequences)) {
      const std::optional<int64_t> last = KeyRing::last_visit(share, own.chunk);
      if (!last) continue;
      const int64_t queries = share.chunks[static_cast<size_t>(own.chunk)].continued;
      const Tensor left = StickBreakingSaved::of_visit(saved.far_log2_rem, *last);
      ops::run(s, ops::Copy{.y = own.per_head(left_HT).col_range(0, queries),
                            .x = left.col_range(0, queries)});
    }
    return left_HT;
  }

  // The gradients of what receives the remainder: the tokens' own values, or a vector.
  void give_remainder_gradients(Stream& s, const Tensor& do_THd, const Tensor& dv_THd,
                                const Weights& dw, const StickBreakingSaved& saved,
                                const Sequences& sequences) const {
    if (!has_remainder()) return;
    const Buffer left_HT = left_by_all(s, saved, sequences);
    for (const OwnTokens& own : own_tokens(sequences)) {
      ops::run(s, ops::AddRemainderBackward{.dv_THd = own.rows(dv_THd),
                                            .dremainder_bias_Hd = remainder_bias(dw),
                                            .do_THd = own.rows(do_THd),
                                            .log2_rem_HT = own.per_head(left_HT),
                                            .params = params_});
    }
  }

  // Gradients that the keys of earlier chunks give to the queries, f32 [T, H*d], and to what they
  // find of the stick.
  struct FarGradients {
    Buffer dq_THd, w_HT;
  };
  FarGradients far_backward(Stream& s, const Tensor& do_THd, const Qkv& x, const Weights& w,
                            const StickBreakingSaved& saved, KeyRing& ring,
                            const Sequences& sequences) const {
    const Tensor& q_THd = x.q;
    const int64_t tokens = q_THd.rows();
    FarGradients far{
        .dq_THd = s.scratch("dq of other chunks", DType::kF32, {tokens, q_THd.cols()}),
        .w_HT = s.scratch("gradient of the remainder", DType::kF32, {model_.heads, tokens})};
    ops::run(s, ops::Fill{.x = far.dq_THd, .value = 0.0f});
    if (has_remainder()) {
      for (const OwnTokens& own : own_tokens(sequences)) {
        ops::run(s, ops::RemainderGradient{.w_HT = own.per_head(far.w_HT),
                                           .do_THd = own.rows(do_THd),
                                           .v_THd = own.rows(x.v),
                                           .remainder_bias_Hd = remainder_bias(w),
                                           .params = params_});
      }
    } else {
      ops::run(s, ops::Fill{.x = far.w_HT, .value = 0.0f});
    }
    while (ring.next()) {
      const OwnTokens own = ring.own();
      ops::run(s, ops::StickBreakingFarBackward{
                      .dq_THd = own.rows(far.dq_THd),
                      .dk_THd = ring.dk(),
                      .dv_THd = ring.dv(),
                      .dgate_TH = ring.dgate(),
                      .w_HT = own.per_head(far.w_HT),
                      .do_THd = own.rows(do_THd),
                      .before_HT = before_visit(saved, ring),
                      .log2_rem_HT = StickBreakingSaved::of_visit(saved.far_log2_rem, ring.index()),
                      .stop_HT = StickBreakingSaved::of_visit(saved.far_stop, ring.index()),
                      .q_THd = own.rows(q_THd),
                      .k_THd = ring.k(),
                      .v_THd = ring.v(),
                      .gate_TH = ring.gate(),
                      .far = ring.keys(),
                      .params = without_remainder(params_of(s, tokens))});
    }
    return far;
  }

  // Where kernels gain from it, the queries of a pack are multiplied by scale * log2(e) when they
  // are made, so that scores are powers of two. That takes two products in the place of one.
  ops::StickBreakingParams params_of(const Stream& s, int64_t tokens) const {
    constexpr int64_t kLarge = int64_t{1} << 22;  // queries, for which a launch does not count
    const int64_t d = model_.head_width();
    const bool gains =
        ops::on_cuda(s) && s.target().has_wgmma() && (d == 32 || d == 64 || d == 128);
    ops::StickBreakingParams params = params_;
    if (gains && !gated_ && qkv_.scales_queries() && tokens * model_.query_width() >= kLarge) {
      params.query_factor = params.scale * std::numbers::log2e_v<float>;
      params.scale = kernels::kFoldedScale;
    }
    return params;
  }

  // Of a range of keys, after which others come: the remainder is that of all.
  static ops::StickBreakingParams without_remainder(ops::StickBreakingParams params) {
    params.remainder = ops::Remainder::kNone;
    return params;
  }
  bool has_remainder() const { return params_.remainder != ops::Remainder::kNone; }
  bool has_bias() const { return params_.remainder == ops::Remainder::kBias; }

  Tensor remainder_bias(const Weights& w) const {
    return has_bias() ? w.at(kRemainderBias) : Tensor();
  }

  // gate_TH = sigmoid(x W^T + b), computed in place.
  void compute_gate(Stream& s, const Tensor& gate_TH, const Tensor& x_TD, const Weights& w) const {
    forget_gate_.forward(s, gate_TH, x_TD, w);
    ops::run(s, ops::BiasSigmoid{.y_TH = gate_TH, .x_TH = gate_TH, .b_H = forget_gate_.bias(w)});
  }

  HostMatrix reference_gate(const HostMatrix& x_TD, const HostWeights& w) const {
    HostMatrix gate_TH = project(x_TD, at(w, kGateWeight));
    for (int64_t t = 0; t < x_TD.rows; ++t) {
      for (int64_t h = 0; h < model_.heads; ++h) {
        double& f = gate_TH.row(t)[h];
        f = 1.0 / (1.0 + std::exp(-(f + at(w, kGateBias).values[h])));
      }
    }
    return gate_TH;
  }

  void gate_backward(Stream& s, const Tensor& dx_TD, const Weights& dw, const Tensor& dgate_TH,
                     const Tensor& gate_TH, const Tensor& x_TD, const Weights& w) const {
    if (gate_penalty_ > 0) add_penalty(s, dgate_TH);
    ops::run(s, ops::SigmoidBackward{.dx_TH = dgate_TH, .dy_TH = dgate_TH, .y_TH = gate_TH});
    forget_gate_.backward(s, dx_TD, dw, dgate_TH, x_TD, w, /*accumulate=*/true);
  }

  // dgate += the gradient of gate_penalty * sum over tokens of their mean gate. The loss of a step
  // is a sum over tokens too, which the optimizer divides by their number.
  void add_penalty(Stream& s, const Tensor& dgate_TH) const {
    const Buffer slope_H = s.scratch("slope of the penalty", dgate_TH.dtype, {model_.heads});
    ops::run(s, ops::Fill{.x = slope_H, .value = gate_penalty_ / static_cast<float>(model_.heads)});
    ops::run(s, ops::AddBias{.y_TN = dgate_TH, .b_N = slope_H});
  }

  void normalise(Stream& s, const Tensor& mix_TD, const Tensor& heads_TD, const Weights& w) const {
    ops::run(s, ops::HeadNorm{.y_THd = mix_TD,
                              .x_THd = heads_TD,
                              .w_Hd = w.at(kHeadNormWeight),
                              .b_Hd = w.at(kHeadNormBias),
                              .heads = params_.heads,
                              .eps = kHeadNormEps});
  }

  AttentionShape model_;
  QkvProjection qkv_;
  Linear forget_gate_{{.parts = {{.weight = kGateWeight, .rows = model_.heads, .bias = kGateBias}},
                       .cols = model_.width,
                       .init = Init::normal(model_.init_std),
                       .role = ParamRole::kOther,
                       .bias_init = Init::constant(kGateBiasInit),
                       .adds_bias = false}};
  bool head_norm_;
  bool gated_;
  float gate_penalty_;
  ops::StickBreakingParams params_;
};

}  // namespace

void register_stickbreaking(AttentionRegistry& registry) {
  registry.add<Options>(
      {.name = "stickbreaking",
       .grouped_heads = true,
       .own_head_dim = true,
       .make = make_module<StickBreakingAttention, Options>,
       .context_problem = [](const Options&) { return std::string(); },
       .fla = in_fla,
       .bench = {{.name = "stickbreaking",
                  .options = {{"skip_epsilon", "0"}, {"forget_gate", "false"}}}}});
}

}  // namespace sbtrain
