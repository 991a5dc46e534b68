// What modules with one fused query-key-value projection have in common: the product, and the cache
// of keys and values.
#pragma once

#include <string_view>
#include <vector>

#include "attention/attention.h"
#include "attention/linear.h"
#include "core/fields.h"

namespace sbtrain {

inline constexpr std::string_view kQProj = "self_attn.q_proj.weight";

// q_proj, k_proj (or what a module has in its place) and v_proj, each [D, D], as one product.
LinearSpec qkv_projection(const ModelConfig& model,
                          std::string_view key = "self_attn.k_proj.weight");

// Queries, keys and values: the three column ranges of a [*, 3D] matrix.
struct Qkv {
  explicit Qkv(const Tensor& qkv)
      : q(qkv.col_range(0, qkv.cols() / 3)),
        k(qkv.col_range(qkv.cols() / 3, qkv.cols() / 3)),
        v(qkv.col_range(2 * (qkv.cols() / 3), qkv.cols() / 3)) {}
  Tensor q, k, v;
};

// The same in double precision on the host.
struct HostQkv {
  HostQkv(const HostMatrix& x_TD, const HostWeights& w);
  HostMatrix q_head(int64_t heads, int64_t head) const {
    return q.columns(head * q.cols / heads, q.cols / heads);
  }
  HostMatrix k_head(int64_t heads, int64_t head) const {
    return k.columns(head * k.cols / heads, k.cols / heads);
  }
  HostMatrix q, k, v;
};

// One row of N numbers for each of at most C tokens of each of B sequences: [B, C, N].
class TokenCache {
 public:
  TokenCache(Memory& memory, std::string_view name, DType dtype, int64_t sequences,
             int64_t capacity, int64_t width);
  const Tensor& tensor() const { return rows_; }
  int64_t capacity() const { return tensor().shape[1]; }
  // The rows of sequence b's first T tokens = x_TN.
  void prefill(Stream& s, int64_t b, Tensor x_TN);
  void append(Stream& s, Tensor x_BN, const DecodeStep& step);

 private:
  Buffer rows_;
};

class KeyValueCache : public AttentionCache {
 public:
  KeyValueCache(Memory& memory, int64_t sequences, int64_t capacity, int64_t width)
      : k(memory, "key cache", memory.compute_dtype(), sequences, capacity, width),
        v(memory, "value cache", memory.compute_dtype(), sequences, capacity, width) {}
  TokenCache k, v;
};

// The option logit_scale of modules whose heads have the model's head_dim, and the scale that it
// means: 1/sqrt(head_dim) if it is 0.
void describe_logit_scale(Fields& f, double& logit_scale);
float logit_scale(double option, const ModelConfig& model);

// The option of modules that can look at only the newest keys.
void describe_window(Fields& f, int64_t& window);

// The number of keys that a token sees through a window when its document offers `keys`.
double keys_in_window(double keys, int64_t window);

}  // namespace sbtrain
