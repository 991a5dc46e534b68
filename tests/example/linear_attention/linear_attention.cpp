// `linear_attention`: attention without a softmax (arXiv 2006.16236, equation 9, with the identity
// as its feature map),
//   o_j = scale sum_{i <= j} (q_j . k_i) v_i,
// i and j of the same document. The sum over keys is a state of fixed size, S_j = sum_{i <= j}
// k_i v_i^T, so that the work is linear in the length and a decode step needs no cache of keys.
#include <vector>

#include "attention/projections.h"
#include "attention/reference.h"
#include "attention/registry.h"
#include "ops/cpu/parallel.h"
#include "ops/run.h"

namespace sbtrain {
namespace {

// ---- The operations ---------------------------------------------------------------------------

// o_j = scale q_j S_j, S_j = sum_{i <= j} k_i v_i^T, i of the same document. q, k, v and o are
// [T, H*d]; q, k and v may be column ranges of one matrix.
struct LinearAttentionForward {
  static constexpr std::string_view kName = "linear_attention_forward";
  Tensor o_THd;
  Tensor q_THd, k_THd, v_THd;
  Sequences sequences{};
  int heads = 0;
  float scale = 1.0f;

  void check() const {
    const ops::Check c(kName);
    c.heads("q_THd", q_THd, q_THd.rows(), heads);
    for (const Tensor& x : {k_THd, v_THd, o_THd}) c.same("k_THd, v_THd or o_THd", x, q_THd);
    c.documents(sequences, q_THd.rows());
  }
};

// With R_i = sum_{j >= i} q_j do_j^T:
//   dq_j = scale S_j do_j   dk_i = scale R_i v_i   dv_i = scale R_i^T k_i
struct LinearAttentionBackward {
  static constexpr std::string_view kName = "linear_attention_backward";
  Tensor dq_THd, dk_THd, dv_THd;  // =
  Tensor do_THd, q_THd, k_THd, v_THd;
  Sequences sequences{};
  int heads = 0;
  float scale = 1.0f;

  void check() const {
    const ops::Check c(kName);
    c.heads("q_THd", q_THd, q_THd.rows(), heads);
    for (const Tensor& x : {dq_THd, dk_THd, dv_THd, do_THd, k_THd, v_THd}) {
      c.same("a gradient, k_THd or v_THd", x, q_THd);
    }
    c.documents(sequences, q_THd.rows());
  }
};

// state = S after the last token of one sequence: [H*d, d], f32.
struct LinearAttentionState {
  static constexpr std::string_view kName = "linear_attention_state";
  Tensor state_Hdd;
  Tensor k_THd, v_THd;
  int heads = 0;

  void check() const {
    const ops::Check c(kName);
    const int64_t d = c.heads("k_THd", k_THd, k_THd.rows(), heads);
    c.same("v_THd", v_THd, k_THd);
    c.matrix("state_Hdd", state_Hdd, heads * d, d);
  }
};

// One new token for each of B sequences: its key and value go into the state [B, H*d, d] first,
// which starts anew at position 0.
struct LinearAttentionDecode {
  static constexpr std::string_view kName = "linear_attention_decode";
  Tensor o_BHd;
  Tensor q_BHd, k_BHd, v_BHd;
  Tensor state_BHdd;
  Tensor positions_B;
  int heads = 0;
  float scale = 1.0f;

  void check() const {
    const ops::Check c(kName);
    const int64_t d = c.heads("q_BHd", q_BHd, q_BHd.rows(), heads);
    for (const Tensor& x : {k_BHd, v_BHd, o_BHd}) c.same("k_BHd, v_BHd or o_BHd", x, q_BHd);
    c.flat("state_BHdd", state_BHdd, q_BHd.rows() * heads * d * d);
    c.flat("positions_B", positions_B, q_BHd.rows(), DType::kI32);
  }
};

// ---- On the CPU -------------------------------------------------------------------------------

float* at(const Tensor& x, int64_t row, int64_t column) {
  return x.f32() + row * x.row_stride + column;
}

// S += a b^T.
void add_outer(float* s, const float* a, const float* b, int64_t d) {
  for (int64_t r = 0; r < d; ++r) {
    for (int64_t c = 0; c < d; ++c) s[r * d + c] += a[r] * b[c];
  }
}
// y = scale S x.
void times(float* y, const float* s, const float* x, int64_t d, float scale) {
  for (int64_t r = 0; r < d; ++r) {
    float sum = 0;
    for (int64_t c = 0; c < d; ++c) sum += s[r * d + c] * x[c];
    y[r] = scale * sum;
  }
}
// y = scale S^T x.
void times_transposed(float* y, const float* s, const float* x, int64_t d, float scale) {
  for (int64_t c = 0; c < d; ++c) {
    float sum = 0;
    for (int64_t r = 0; r < d; ++r) sum += s[r * d + c] * x[r];
    y[c] = scale * sum;
  }
}

// body(begin, end, column, S) for every document and head: its tokens, its first column, and a
// state of zeros.
template <typename Body>
void for_each_head(const Sequences& sequences, int64_t heads, int64_t d, const Body& body) {
  const int32_t* bounds = sequences.cu_seqlens.i32();
  const int64_t work = sequences.max_seqlen * d * d;
  ops::cpu::parallel_rows(sequences.count * heads, work, [&](int64_t first, int64_t last) {
    std::vector<float> state(static_cast<size_t>(d * d));
    for (int64_t n = first; n < last; ++n) {
      std::fill(state.begin(), state.end(), 0.0f);
      body(bounds[n / heads], bounds[n / heads + 1], n % heads * d, state.data());
    }
  });
}

void run(ops::cpu::Cpu, Stream& /*s*/, const LinearAttentionForward& op) {
  const int64_t d = op.q_THd.cols() / op.heads;
  for_each_head(op.sequences, op.heads, d, [&](int64_t begin, int64_t end, int64_t c, float* s) {
    for (int64_t j = begin; j < end; ++j) {
      add_outer(s, at(op.k_THd, j, c), at(op.v_THd, j, c), d);
      times_transposed(at(op.o_THd, j, c), s, at(op.q_THd, j, c), d, op.scale);
    }
  });
}

void run(ops::cpu::Cpu, Stream& /*s*/, const LinearAttentionBackward& op) {
  const int64_t d = op.q_THd.cols() / op.heads;
  for_each_head(op.sequences, op.heads, d, [&](int64_t begin, int64_t end, int64_t c, float* s) {
    for (int64_t j = begin; j < end; ++j) {
      add_outer(s, at(op.k_THd, j, c), at(op.v_THd, j, c), d);
      times(at(op.dq_THd, j, c), s, at(op.do_THd, j, c), d, op.scale);
    }
    std::fill(s, s + d * d, 0.0f);
    for (int64_t i = end - 1; i >= begin; --i) {
      add_outer(s, at(op.q_THd, i, c), at(op.do_THd, i, c), d);
      times(at(op.dk_THd, i, c), s, at(op.v_THd, i, c), d, op.scale);
      times_transposed(at(op.dv_THd, i, c), s, at(op.k_THd, i, c), d, op.scale);
    }
  });
}

void run(ops::cpu::Cpu, Stream& /*s*/, const LinearAttentionState& op) {
  const int64_t d = op.k_THd.cols() / op.heads;
  for (int64_t h = 0; h < op.heads; ++h) {
    float* s = at(op.state_Hdd, h * d, 0);
    std::fill(s, s + d * d, 0.0f);
    for (int64_t i = 0; i < op.k_THd.rows(); ++i) {
      add_outer(s, at(op.k_THd, i, h * d), at(op.v_THd, i, h * d), d);
    }
  }
}

void run(ops::cpu::Cpu, Stream& /*s*/, const LinearAttentionDecode& op) {
  const int64_t d = op.q_BHd.cols() / op.heads;
  for (int64_t b = 0; b < op.q_BHd.rows(); ++b) {
    for (int64_t h = 0; h < op.heads; ++h) {
      float* s = op.state_BHdd.f32() + (b * op.heads + h) * d * d;
      if (op.positions_B.i32()[b] == 0) std::fill(s, s + d * d, 0.0f);
      add_outer(s, at(op.k_BHd, b, h * d), at(op.v_BHd, b, h * d), d);
      times_transposed(at(op.o_BHd, b, h * d), s, at(op.q_BHd, b, h * d), d, op.scale);
    }
  }
}

// ---- The module -------------------------------------------------------------------------------

struct Options {
  double logit_scale = 0.0;  // 0: 1/sqrt(head_dim)
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  describe_logit_scale(f, o.logit_scale);
}

struct LinearSaved : AttentionSaved {
  QkvSaved qkv;
};

struct LinearCache : AttentionCache {
  Buffer state_BHdd;
};

class LinearAttention : public Attention {
 public:
  LinearAttention(const Options& options, const AttentionShape& model)
      : model_(model),
        qkv_(model),
        heads_(static_cast<int>(model.heads)),
        scale_(logit_scale(options.logit_scale, model)) {}

  int64_t mix_width(int64_t /*model_width*/) const override { return model_.query_width(); }

  std::vector<TensorSpec> parameters() const override { return qkv_.parameters(); }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    auto saved = std::make_unique<LinearSaved>();
    saved->qkv = qkv_.allocate(memory, tokens);
    return saved;
  }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<LinearSaved&>(saved);
    const Qkv x = qkv_.forward(s, mine.qkv, x_TD, w);
    ops::run(s, LinearAttentionForward{.o_THd = mix_TD,
                                       .q_THd = x.q,
                                       .k_THd = x.k,
                                       .v_THd = x.v,
                                       .sequences = sequences,
                                       .heads = heads_,
                                       .scale = scale_});
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor /*mix_TD*/,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    const QkvSaved& qkv = static_cast<const LinearSaved&>(saved).qkv;
    const Qkv x = qkv_.saved(qkv);
    const Buffer dqkv = qkv_.gradients(s, x_TD.rows());
    const Qkv dx = qkv_.view(dqkv);
    ops::run(s, LinearAttentionBackward{.dq_THd = dx.q,
                                        .dk_THd = dx.k,
                                        .dv_THd = dx.v,
                                        .do_THd = dmix_TD,
                                        .q_THd = x.q,
                                        .k_THd = x.k,
                                        .v_THd = x.v,
                                        .sequences = sequences,
                                        .heads = heads_,
                                        .scale = scale_});
    qkv_.backward(s, dx_TD, dw, dqkv, qkv, x_TD, w);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t /*capacity*/) const override {
    auto cache = std::make_unique<LinearCache>();
    cache->state_BHdd = memory.allocate(MemoryClass::kAttention, "attention state", DType::kF32,
                                        {sequences, model_.query_width(), model_.head_width()});
    return cache;
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const Qkv x = qkv_.saved(static_cast<const LinearSaved&>(saved).qkv);
    const Tensor& states = static_cast<LinearCache&>(cache).state_BHdd;
    const Tensor state =
        states.row_range(b, 1).reshaped({model_.query_width(), model_.head_width()});
    ops::run(s,
             LinearAttentionState{.state_Hdd = state, .k_THd = x.k, .v_THd = x.v, .heads = heads_});
  }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    const Tensor& states = static_cast<LinearCache&>(cache).state_BHdd;
    const QkvSaved qkv = qkv_.scratch(s, x_BD.rows());
    const Qkv x = qkv_.forward(s, qkv, x_BD, w);
    ops::run(s, LinearAttentionDecode{.o_BHd = mix_BD,
                                      .q_BHd = x.q,
                                      .k_BHd = x.k,
                                      .v_BHd = x.v,
                                      .state_BHdd = states.row_range(0, x_BD.rows()),
                                      .positions_B = step.positions_B,
                                      .heads = heads_,
                                      .scale = scale_});
  }

  HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                       int64_t /*max_seqlen*/) const override {
    const HostQkv x = qkv_.reference(x_TD, w);
    HostMatrix o(x_TD.rows, model_.query_width());
    for (int64_t h = 0; h < heads_; ++h) {
      const HostMatrix q = x.q_head(heads_, h);
      const HostMatrix k = x.k_head(heads_, h);
      mix_head(o, heads_, h, x.v, [&](int64_t j, std::vector<double>& row) {
        for (int64_t i = 0; i <= j; ++i) row[i] = scale_ * dot(q, j, k, i);
        return 0.0;
      });
    }
    return o;
  }

  double flops_per_token(double /*keys*/) const override {
    return 4.0 * static_cast<double>(model_.query_width() * model_.head_width());
  }

 private:
  AttentionShape model_;
  QkvProjection qkv_;
  int heads_;
  float scale_;
};

}  // namespace

void register_linear_attention(AttentionRegistry& registry) {
  registry.add<Options>({.name = "linear_attention",
                         .own_head_dim = true,
                         .make = make_module<LinearAttention, Options>});
}

}  // namespace sbtrain
