#include "attention/projections.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "ops/attention.h"
#include "ops/memory.h"
#include "ops/norm.h"

namespace sbtrain {

namespace {

constexpr std::string_view kValue = "v";

std::string name_of_part(std::string_view part, std::string_view tensor) {
  return std::string("self_attn.").append(part).append("_").append(tensor);
}

// Each head of d columns `times` times.
HostMatrix repeat_heads(HostMatrix x, int64_t d, int64_t times) {
  if (times == 1) return x;
  HostMatrix y(x.rows, x.cols * times);
  for (int64_t t = 0; t < y.rows; ++t) {
    for (int64_t c = 0; c < y.cols; ++c) y.row(t)[c] = x.row(t)[c / d / times * d + c % d];
  }
  return y;
}

}  // namespace

LinearSpec qkv_spec(const AttentionShape& model, const QkvRows& rows, bool bias,
                    std::string_view key) {
  const auto part = [&](std::string_view name, int64_t count, int64_t heads) {
    return LinearSpec::Part{.weight = name_of_part(name, "proj.weight"),
                            .rows = count,
                            .bias = bias ? name_of_part(name, "proj.bias") : "",
                            .heads = heads,
                            .groups = model.key_heads()};
  };
  return {.parts = {part("q", rows.q, model.heads), part(key, rows.k, model.key_heads()),
                    part(kValue, rows.v, model.key_heads())},
          .cols = model.width,
          .init = Init::normal(model.init_std)};
}

HostMatrix project_part(const HostMatrix& x_TD, const HostWeights& w, std::string_view part) {
  return project(x_TD, w, name_of_part(part, "proj.weight"), name_of_part(part, "proj.bias"));
}

void describe_qkv_bias(Fields& f, bool& qkv_bias) {
  f.add("qkv_bias", qkv_bias, "The projections to queries, keys and values have biases.");
}

void describe(Fields& f, QkvOptions& o) {
  describe_qkv_bias(f, o.qkv_bias);
  f.add("qk_norm", o.qk_norm, "RMSNorm of queries and keys, before they are rotated.");
  f.add("qk_norm_scope", o.qk_norm_scope, Rule{}.when("qk_norm", {"true"}),
        "What a norm of queries or keys is over: each head by itself, all with the same weights; "
        "or all heads jointly, with a weight for each channel of each head.");
}

QkvProjection::QkvProjection(const AttentionShape& model, const QkvOptions& options,
                             std::string_view key)
    : heads_(model.heads),
      key_heads_(model.key_heads()),
      head_dim_(model.head_width()),
      qk_norm_(options.qk_norm),
      joint_norm_(options.joint_norm()),
      norm_eps_(static_cast<float>(model.norm_eps)),
      key_(key),
      linear_(qkv_spec(
          model,
          {.q = heads_ * head_dim_, .k = key_heads_ * head_dim_, .v = key_heads_ * head_dim_},
          options.qkv_bias, key)) {}

std::vector<TensorSpec> QkvProjection::parameters() const {
  std::vector<TensorSpec> specs = linear_.parameters();
  if (!qk_norm_) return specs;
  const auto add_norm = [&](std::string_view part, int64_t heads) {
    specs.push_back({.name = name_of_part(part, "norm.weight"),
                     .shape = {heads / normed_parts(heads) * head_dim_},
                     .storage = {},
                     .init = Init::constant(1.0)});
  };
  add_norm("q", heads_);
  add_norm(key_, key_heads_);
  return specs;
}

QkvSaved QkvProjection::allocate(Memory& memory, int64_t tokens) const {
  const auto buffer = [&](std::string_view name, int64_t cols) {
    return memory.allocate(MemoryClass::kAttention, name, memory.compute_dtype(), {tokens, cols});
  };
  QkvSaved saved{.qkv_TN = buffer("qkv", columns()), .qk_TN = {}};
  if (qk_norm_) saved.qk_TN = buffer("qk normed", qk_columns());
  return saved;
}

QkvSaved QkvProjection::scratch(const Stream& s, int64_t tokens) const {
  const DType dtype = s.memory().compute_dtype();
  QkvSaved saved{.qkv_TN = s.scratch("qkv", dtype, {tokens, columns()}), .qk_TN = {}};
  if (qk_norm_) saved.qk_TN = s.scratch("qk normed", dtype, {tokens, qk_columns()});
  return saved;
}

Qkv QkvProjection::view(const Tensor& qkv_TN) const {
  const int64_t q = heads_ * head_dim_;
  const int64_t k = key_heads_ * head_dim_;
  return {.q = qkv_TN.col_range(0, q),
          .k = qkv_TN.col_range(q, k),
          .v = qkv_TN.col_range(q + k, k),
          .qk = qkv_TN.col_range(0, q + k)};
}

Qkv QkvProjection::saved(const QkvSaved& saved) const {
  Qkv x = view(saved.qkv_TN);
  if (!qk_norm_) return x;
  x.qk = saved.qk_TN;
  x.q = x.qk.col_range(0, heads_ * head_dim_);
  x.k = x.qk.col_range(heads_ * head_dim_, key_heads_ * head_dim_);
  return x;
}

void QkvProjection::normalise(Stream& s, const Tensor& y, const Tensor& x, int64_t heads,
                              const Tensor& w) const {
  ops::run(s, ops::HeadRmsNorm{.y_THd = y,
                               .x_THd = x,
                               .w_d = w,
                               .heads = static_cast<int>(normed_parts(heads)),
                               .eps = norm_eps_});
}

Qkv QkvProjection::forward(Stream& s, const QkvSaved& saved, Tensor x_TD, const Weights& w,
                           float query_factor, Tensor x_amax_1) const {
  if (query_factor == 1.0f) {
    linear_.forward(s, saved.qkv_TN, x_TD, w, Linear::ForwardOptions{.amax_1 = x_amax_1});
  } else {
    require(scales_queries(), "a factor of queries that have a norm or a bias");
    linear_.forward_scaled(s, saved.qkv_TN, x_TD, w, heads_ * head_dim_, query_factor, x_amax_1);
  }
  return normed(s, saved, w);
}

Qkv QkvProjection::decode(Stream& s, const QkvSaved& saved, Tensor x_BD, const Weights& w,
                          const InputNorm& norm) const {
  linear_.decode(s, saved.qkv_TN, x_BD, w, {.norm = norm});
  return normed(s, saved, w);
}

Qkv QkvProjection::normed(Stream& s, const QkvSaved& saved, const Weights& w) const {
  const Qkv y = this->saved(saved);
  if (qk_norm_) {
    const Qkv x = view(saved.qkv_TN);
    normalise(s, y.q, x.q, heads_, w.at(name_of_part("q", "norm.weight")));
    normalise(s, y.k, x.k, key_heads_, w.at(name_of_part(key_, "norm.weight")));
  }
  return y;
}

Buffer QkvProjection::gradients(const Stream& s, int64_t tokens) const {
  return s.scratch("dqkv", s.memory().compute_dtype(), {tokens, columns()});
}

void QkvProjection::backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dqkv_TN,
                             const QkvSaved& saved, Tensor x_TD, const Weights& w,
                             Tensor x_amax_1) const {
  if (qk_norm_) {
    const auto norm = [&](const Tensor& gradient, const Tensor& x, int64_t heads,
                          const std::string& name) {
      ops::run(s, ops::HeadRmsNormBackward{.dx_THd = gradient,
                                           .dw_d = dw.at(name),
                                           .dy_THd = gradient,
                                           .x_THd = x,
                                           .w_d = w.at(name),
                                           .heads = static_cast<int>(normed_parts(heads)),
                                           .eps = norm_eps_});
    };
    const Qkv gradient = view(dqkv_TN);
    const Qkv x = view(saved.qkv_TN);
    norm(gradient.q, x.q, heads_, name_of_part("q", "norm.weight"));
    norm(gradient.k, x.k, key_heads_, name_of_part(key_, "norm.weight"));
  }
  linear_.backward(s, dx_TD, dw, dqkv_TN, x_TD, w, Linear::BackwardOptions{.x_amax_1 = x_amax_1});
}

HostQkv QkvProjection::reference(const HostMatrix& x_TD, const HostWeights& w) const {
  HostQkv x{.q = project_part(x_TD, w, "q"),
            .k = project_part(x_TD, w, key_),
            .v = project_part(x_TD, w, kValue)};
  if (qk_norm_) {
    rms_norm(x.q, at(w, name_of_part("q", "norm.weight")), norm_eps_);
    rms_norm(x.k, at(w, name_of_part(key_, "norm.weight")), norm_eps_);
  }
  const int64_t group = heads_ / key_heads_;
  x.k = repeat_heads(std::move(x.k), head_dim_, group);
  x.v = repeat_heads(std::move(x.v), head_dim_, group);
  return x;
}

TokenCache::TokenCache(Memory& memory, std::string_view name, DType dtype, int64_t sequences,
                       int64_t capacity, int64_t width)
    : rows_(memory.allocate(MemoryClass::kAttention, name, dtype, {sequences, capacity, width})) {}

void TokenCache::prefill(Stream& s, int64_t b, Tensor x_TN) {
  const Tensor& all = rows_;
  require(x_TN.rows() <= all.shape[1], "a prompt of {} tokens does not fit a cache of {}",
          x_TN.rows(), all.shape[1]);
  const Tensor sequence = all.row_range(b, 1).reshaped({all.shape[1], all.shape[2]});
  ops::run(s, ops::Copy{.y = sequence.row_range(0, x_TN.rows()), .x = x_TN});
}

void TokenCache::append(Stream& s, Tensor x_BN, const DecodeStep& step) {
  ops::run(s, ops::CacheAppend{
                  .cache_BCN = first(x_BN.rows()), .x_BN = x_BN, .positions_B = step.positions_B});
}

void describe_logit_scale(Fields& f, double& logit_scale) {
  f.add("logit_scale", logit_scale, at_least(0).with_example(0.7),
        "Factor of q.k; 0: 1/sqrt(head_dim).");
}

float logit_scale(double option, const AttentionShape& model) {
  if (option != 0.0) return static_cast<float>(option);
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(model.head_width())));
}

void describe_window(Fields& f, int64_t& window) {
  f.add("window", window, between(0, kMaxSize).with_example(3),
        "Keys that a token sees, itself included; 0: all of its document.");
}

double keys_in_window(double keys, int64_t window) {
  return window > 0 ? std::min(keys, static_cast<double>(window)) : keys;
}

}  // namespace sbtrain
