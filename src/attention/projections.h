// What modules with queries, keys and values in heads have in common: the projections, with their
// options and groups of heads, and the cache of keys and values. H is the number of heads of
// queries, G that of keys and values, d the head dimension.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention.h"
#include "core/enum_names.h"
#include "core/fields.h"
#include "layers/linear.h"

namespace sbtrain {

// What one norm of queries, or of keys, is over.
enum class QkNormScope : uint8_t { kHead, kJoint };
template <>
inline constexpr auto kNames<QkNormScope> =
    enum_names<QkNormScope>({{QkNormScope::kHead, "head"}, {QkNormScope::kJoint, "joint"}});

struct QkvOptions {
  bool qkv_bias = false;
  bool qk_norm = false;
  QkNormScope qk_norm_scope = QkNormScope::kHead;
  bool joint_norm() const { return qk_norm && qk_norm_scope == QkNormScope::kJoint; }
  bool operator==(const QkvOptions&) const = default;
};
void describe_qkv_bias(Fields& f, bool& qkv_bias);

// The projections of x [T, D] to queries, keys and values as one product: q_proj.weight, that of
// `key` and v_proj.weight, each [rows, D], and with `bias` q_proj.bias and so on.
struct QkvRows {
  int64_t q, k, v;
};
LinearSpec qkv_spec(const AttentionShape& model, const QkvRows& rows, bool bias,
                    std::string_view key = "k");
// One of them in double precision, with its bias if there is one; `part` is "q", "k" or "v".
HostMatrix project_part(const HostMatrix& x_TD, const HostWeights& w, std::string_view part);

void describe(Fields& f, QkvOptions& o);

// Queries [*, H*d], keys and values [*, G*d]: column ranges. Queries and keys are neighbours, so
// that both are rotated at once.
struct Qkv {
  Tensor q, k, v;
  Tensor qk;  // [*, (H+G)*d]
};

// The same in double precision on the host, with H heads of keys and values.
struct HostQkv {
  HostMatrix q_head(int64_t heads, int64_t head) const {
    return q.columns(head * q.cols / heads, q.cols / heads);
  }
  HostMatrix k_head(int64_t heads, int64_t head) const {
    return k.columns(head * k.cols / heads, k.cols / heads);
  }
  HostMatrix q, k, v;
};

// What a forward pass keeps of the projections.
struct QkvSaved {
  Buffer qkv_TN;  // N = (H + 2G) d: as projected
  Buffer qk_TN;   // N = (H + G) d: queries and keys after their norm, with qk_norm
};

// q_proj [H*d, D], k_proj (or what a module has in its place) and v_proj [G*d, D] as one product,
// with biases if qkv_bias is set; then, with qk_norm, the RMSNorm of queries and keys: of each head
// (arXiv 2010.04245, with RMSNorm as in Qwen3), with one weight for the channels of all heads, or
// of all heads together with a weight for each channel (OLMo 2, arXiv 2501.00656).
class QkvProjection {
 public:
  // `key` names the projection and the norm of keys: <key>_proj.weight, <key>_norm.weight.
  explicit QkvProjection(const AttentionShape& model, const QkvOptions& options = {},
                         std::string_view key = "k");

  std::vector<TensorSpec> parameters() const;

  QkvSaved allocate(Memory& memory, int64_t tokens) const;
  QkvSaved scratch(const Stream& s, int64_t tokens) const;

  // The queries, keys and values, which the caller may change in place: rotate, for example. With a
  // factor, which needs scales_queries(), the queries are multiplied by it before they are rounded.
  // x_amax_1 is AttentionSaved::x_amax_1.
  Qkv forward(Stream& s, const QkvSaved& saved, Tensor x_TD, const Weights& w,
              float query_factor = 1.0f, Tensor x_amax_1 = {}) const;
  bool in_fp8(const Stream& s, int64_t tokens) const { return linear_.in_fp8(s, tokens); }
  bool scales_queries() const { return !qk_norm_ && !linear_.has_bias(); }
  // The same for a decode step.
  Qkv decode(Stream& s, const QkvSaved& saved, Tensor x_BD, const Weights& w,
             const InputNorm& norm) const;
  // What forward() returned, with the changes.
  Qkv saved(const QkvSaved& saved) const;

  // The gradients: scratch [T, (H+2G)*d], which the caller fills with those of what forward()
  // returned before the changes.
  Buffer gradients(const Stream& s, int64_t tokens) const;
  Qkv view(const Tensor& dqkv_TN) const;
  // dx_TD = gradient; those of the weights are added to dw. Overwrites dqkv_TN.
  void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dqkv_TN, const QkvSaved& saved,
                Tensor x_TD, const Weights& w, Tensor x_amax_1 = {}) const;

  int64_t heads() const { return heads_; }
  int64_t key_heads() const { return key_heads_; }
  // The head of keys and values that head `head` of the queries reads.
  int64_t key_head(int64_t head) const { return head / (heads_ / key_heads_); }

  HostQkv reference(const HostMatrix& x_TD, const HostWeights& w) const;

 private:
  int64_t columns() const { return (heads_ + 2 * key_heads_) * head_dim_; }
  int64_t qk_columns() const { return (heads_ + key_heads_) * head_dim_; }
  Qkv normed(Stream& s, const QkvSaved& saved, const Weights& w) const;
  void normalise(Stream& s, const Tensor& y, const Tensor& x, int64_t heads, const Tensor& w) const;
  // The parts that a norm divides queries or keys of so many heads into, each of which it scales by
  // itself.
  int64_t normed_parts(int64_t heads) const { return joint_norm_ ? 1 : heads; }

  int64_t heads_, key_heads_, head_dim_;
  bool qk_norm_, joint_norm_;
  float norm_eps_;
  std::string key_;
  Linear linear_;
};

// One row of N numbers for each of at most C tokens of each of B sequences: [B, C, N].
class TokenCache {
 public:
  TokenCache(Memory& memory, std::string_view name, DType dtype, int64_t sequences,
             int64_t capacity, int64_t width);
  // The rows of the first sequences.
  Tensor first(int64_t sequences) const { return rows_.tensor().row_range(0, sequences); }
  int64_t capacity() const { return rows_.tensor().shape[1]; }
  // The rows of sequence b's first T tokens = x_TN.
  void prefill(Stream& s, int64_t b, Tensor x_TN);
  // One row more for each of the first B sequences.
  void append(Stream& s, Tensor x_BN, const DecodeStep& step);

 private:
  Buffer rows_;
};

// `width` is that of the keys of one token, AttentionShape::key_width().
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
float logit_scale(double option, const AttentionShape& model);

// The option of modules that can look at only the newest keys.
void describe_window(Fields& f, int64_t& window);

// The number of keys that a token sees through a window when its document offers `keys`.
double keys_in_window(double keys, int64_t window);

}  // namespace sbtrain
