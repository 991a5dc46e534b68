#include "attention/projections.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/memory.h"

namespace sbtrain {

HostQkv::HostQkv(const HostMatrix& x_TD, const HostWeights& w)
    : q(project(x_TD, at(w, kQProj))),
      k(project(x_TD, at(w, "self_attn.k_proj.weight"))),
      v(project(x_TD, at(w, "self_attn.v_proj.weight"))) {}

LinearSpec qkv_projection(const ModelConfig& model, std::string_view key) {
  return {.parts = {{"self_attn.q_proj.weight", model.width},
                    {std::string(key), model.width},
                    {"self_attn.v_proj.weight", model.width}},
          .cols = model.width,
          .init = Init::normal(model.init_std)};
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
  ops::run(s, ops::CacheAppend{.cache_BCN = rows_, .x_BN = x_BN, .positions_B = step.positions_B});
}

void describe_logit_scale(Fields& f, double& logit_scale) {
  f.add("logit_scale", logit_scale, at_least(0).with_example(0.7),
        "Factor of q.k; 0: 1/sqrt(head_dim).");
}

float logit_scale(double option, const ModelConfig& model) {
  if (option != 0.0) return static_cast<float>(option);
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(model.head_dim())));
}

void describe_window(Fields& f, int64_t& window) {
  f.add("window", window, between(0, kMaxSize).with_example(3),
        "Keys that a token sees, itself included; 0: all of its document.");
}

double keys_in_window(double keys, int64_t window) {
  return window > 0 ? std::min(keys, static_cast<double>(window)) : keys;
}

}  // namespace sbtrain
