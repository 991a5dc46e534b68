// `softmax`: the attention of Llama, with rotary positions (arXiv 2104.09864) or none (NoPE).
#include "attention/projections.h"
#include "attention/registry.h"
#include "core/error.h"
#include "ops/ops.h"

namespace sbtrain {
namespace {

struct SoftmaxSaved : AttentionSaved {
  Buffer qkv_T3D;  // q and k rotated
  Buffer lse_HT;
};

class SoftmaxAttention : public Attention {
 public:
  SoftmaxAttention(const AttentionConfig& config, const ModelConfig& model)
      : model_(model), rotates_(config.position == "rope") {
    if (config.position != "rope" && config.position != "none") {
      fail(ExitCode::kConfig, "model.attention.position: '{}' is not one of rope, none",
           config.position);
    }
    if (rotates_ && model.head_dim() % 2 != 0) {
      fail(ExitCode::kConfig, "model.attention.position: rope needs an even head dimension, not {}",
           model.head_dim());
    }
    params_ = {.heads = static_cast<int>(model.heads), .scale = logit_scale(config, model)};
    // q and k lie side by side, so one call rotates both.
    rope_ = {.heads = 2 * params_.heads, .base = static_cast<float>(config.rope_base)};
  }

  std::vector<TensorSpec> parameters() const override { return qkv_parameters(model_); }

  std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const override {
    auto saved = std::make_unique<SoftmaxSaved>();
    saved->qkv_T3D = memory.allocate(MemoryClass::kAttention, "qkv", memory.compute_dtype(),
                                     {tokens, 3 * model_.width});
    saved->lse_HT =
        memory.allocate(MemoryClass::kAttention, "lse", DType::kF32, {model_.heads, tokens});
    return saved;
  }

  void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w, AttentionSaved& saved,
               const Sequences& sequences) const override {
    auto& mine = static_cast<SoftmaxSaved&>(saved);
    project_qkv(s, mine.qkv_T3D, x_TD, w);
    if (rotates_) ops::rope(s, queries_and_keys(mine.qkv_T3D), sequences.positions_T, rope_);
    const Qkv x(mine.qkv_T3D);
    ops::softmax_forward(
        s, {.o_THd = mix_TD, .lse_HT = mine.lse_HT, .q_THd = x.q, .k_THd = x.k, .v_THd = x.v},
        sequences, params_);
  }

  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                Tensor x_TD, const Weights& w, AttentionSaved& saved,
                const Sequences& sequences) const override {
    const auto& mine = static_cast<const SoftmaxSaved&>(saved);
    const Buffer dqkv =
        s.scratch("dqkv", s.memory().compute_dtype(), {x_TD.rows(), 3 * model_.width});
    const Qkv x(mine.qkv_T3D);
    const Qkv dx(dqkv);
    ops::softmax_backward(s,
                          {.dq_THd = dx.q,
                           .dk_THd = dx.k,
                           .dv_THd = dx.v,
                           .do_THd = dmix_TD,
                           .o_THd = mix_TD,
                           .lse_HT = mine.lse_HT,
                           .q_THd = x.q,
                           .k_THd = x.k,
                           .v_THd = x.v},
                          sequences, params_);
    if (rotates_) {
      ops::RopeParams back = rope_;
      back.inverse = true;
      ops::rope(s, queries_and_keys(dqkv), sequences.positions_T, back);
    }
    project_qkv_backward(s, dx_TD, dw, dqkv, x_TD, w);
  }

  std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                 int64_t capacity) const override {
    return std::make_unique<KeyValueCache>(memory, sequences, capacity, model_.width);
  }

  void prefill(Stream& s, AttentionCache& cache, int64_t b,
               const AttentionSaved& saved) const override {
    const Qkv x(static_cast<const SoftmaxSaved&>(saved).qkv_T3D);
    auto& mine = static_cast<KeyValueCache&>(cache);
    mine.k.prefill(s, b, x.k);
    mine.v.prefill(s, b, x.v);
  }

  void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w, AttentionCache& cache,
              const DecodeStep& step) const override {
    auto& mine = static_cast<KeyValueCache&>(cache);
    const Buffer qkv =
        s.scratch("qkv", s.memory().compute_dtype(), {x_BD.rows(), 3 * model_.width});
    project_qkv(s, qkv, x_BD, w);
    if (rotates_) ops::rope(s, queries_and_keys(qkv), step.positions_B, rope_);
    const Qkv x(qkv);
    mine.k.append(s, x.k, step);
    mine.v.append(s, x.v, step);
    ops::softmax_decode(s,
                        {.o_BHd = mix_BD,
                         .q_BHd = x.q,
                         .k_cache_BCHd = mine.k.tensor(),
                         .v_cache_BCHd = mine.v.tensor(),
                         .lengths_B = step.lengths_B},
                        params_);
  }

  double flops_per_token(double keys) const override {
    return 4.0 * static_cast<double>(model_.width) * keys;
  }

 private:
  Tensor queries_and_keys(const Tensor& qkv) const { return qkv.col_range(0, 2 * model_.width); }

  ModelConfig model_;
  bool rotates_;
  ops::SoftmaxParams params_;
  ops::RopeParams rope_;
};

}  // namespace

void register_softmax(AttentionRegistry& registry) {
  registry["softmax"] = [](const AttentionConfig& config, const ModelConfig& model) {
    return std::make_unique<SoftmaxAttention>(config, model);
  };
}

}  // namespace sbtrain
