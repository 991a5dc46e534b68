// The ops as functions with positional arguments.
#pragma once

#include <utility>

#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/coca.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rebased.h"
#include "ops/rope.h"
#include "ops/short_conv.h"

namespace sbtrain::ops {

using T = const Tensor&;
inline void fill(Stream& s, T x, float value) {
  run(s, Fill{x, value});
}
inline void copy(Stream& s, T y, T x) {
  run(s, Copy{y, x});
}
inline void add(Stream& s, T y, T x) {
  run(s, Add{y, x});
}
inline void copy_from_host(Stream& s, T y, const void* host) {
  run(s, CopyFromHost{y, host});
}
inline void copy_to_host(Stream& s, void* host, T x) {
  run(s, CopyToHost{host, x});
}
inline void synchronize(Stream& s) {
  run(s, Synchronize{});
}
inline void embedding(Stream& s, T y, T tokens, T w, float scale) {
  run(s, Embedding{y, tokens, w, scale});
}
inline void embedding_backward(Stream& s, T dw, T dy, T tokens, float scale) {
  run(s, EmbeddingBackward{dw, dy, tokens, scale});
}
inline void rmsnorm(Stream& s, T y, T x, T w, float eps) {
  run(s, RmsNorm{y, x, w, eps});
}
inline void rmsnorm_backward(Stream& s, T dx, T dw, T dy, T x, T w, float eps) {
  run(s, RmsNormBackward{dx, dw, dy, x, w, eps});
}
inline void layernorm(Stream& s, T y, T x, T w, T b, float eps) {
  run(s, LayerNorm{y, x, w, b, eps});
}
inline void layernorm_backward(Stream& s, T dx, T dw, T db, T dy, T x, T w, float eps,
                               bool accumulate) {
  run(s, LayerNormBackward{dx, dw, db, dy, x, w, eps, accumulate});
}
inline void head_norm(Stream& s, T y, T x, T w, T b, int heads, float eps) {
  run(s, HeadNorm{y, x, w, b, heads, eps});
}
inline void head_norm_backward(Stream& s, T dx, T dw, T db, T dy, T x, T w, int heads, float eps) {
  run(s, HeadNormBackward{dx, dw, db, dy, x, w, heads, eps});
}
struct LinearOptions {
  float alpha = 1.0f;
  Tensor residual{};
};
inline void linear(Stream& s, T y, T x, T w, const LinearOptions& o = {}) {
  run(s, Linear{y, x, w, o.alpha, o.residual});
}
inline void linear_backward_input(Stream& s, T dx, T dy, T w, float alpha = 1.0f,
                                  bool accumulate = false) {
  run(s, LinearBackwardInput{dx, dy, w, alpha, accumulate});
}
inline void linear_backward_weight(Stream& s, T dw, T dy, T x, float alpha = 1.0f) {
  run(s, LinearBackwardWeight{dw, dy, x, alpha});
}
inline void add_bias(Stream& s, T y, T b) {
  run(s, AddBias{y, b});
}
inline void bias_backward(Stream& s, T db, T dy) {
  run(s, BiasBackward{db, dy});
}
inline void swiglu(Stream& s, T y, T gate_up) {
  run(s, Swiglu{y, gate_up});
}
inline void swiglu_backward(Stream& s, T dgate_up, T dy, T gate_up) {
  run(s, SwigluBackward{dgate_up, dy, gate_up});
}
inline void bias_sigmoid(Stream& s, T y, T x, T b) {
  run(s, BiasSigmoid{y, x, b});
}
inline void sigmoid_backward(Stream& s, T dx, T dy, T y) {
  run(s, SigmoidBackward{dx, dy, y});
}
inline void bias_gelu(Stream& s, T y, T x, T b) {
  run(s, BiasGelu{y, x, b});
}
inline void bias_gelu_backward(Stream& s, T dx, T dy, T x, T b) {
  run(s, BiasGeluBackward{dx, dy, x, b});
}
inline void rope(Stream& s, T x, T positions, const RopeParams& params) {
  run(s, Rope{x, positions, params});
}
inline void coca_query(Stream& s, T y, T q, T positions, const CocaParams& params) {
  run(s, CocaQuery{y, q, positions, params});
}
inline void coca_query_backward(Stream& s, T dq, T dy, T q, T positions, const CocaParams& params) {
  run(s, CocaQueryBackward{dq, dy, q, positions, params});
}
inline void coca_key(Stream& s, T y, T t, T positions, const CocaParams& params) {
  run(s, CocaKey{y, t, positions, params});
}
inline void coca_key_backward(Stream& s, T dt, T dy, T y, T positions, const CocaParams& params) {
  run(s, CocaKeyBackward{dt, dy, y, positions, params});
}
template <typename Op, typename Params>
void run_pack(Stream& s, Op op, const Sequences& sequences, const Params& params) {
  op.sequences = sequences;
  op.params = params;
  run(s, op);
}
inline void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& q,
                                  const StickBreakingParams& p) {
  run_pack(s, t, q, p);
}
inline void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& q,
                                   const StickBreakingParams& p) {
  run_pack(s, t, q, p);
}
inline void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& q,
                            const SoftmaxParams& p) {
  run_pack(s, t, q, p);
}
inline void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& q,
                             const SoftmaxParams& p) {
  run_pack(s, t, q, p);
}
inline void softmax_bias_forward(Stream& s, SoftmaxForward t, const SoftmaxBias& bias,
                                 const Sequences& q, const SoftmaxParams& p) {
  t.bias = bias;
  run_pack(s, t, q, p);
}
inline void softmax_bias_backward(Stream& s, SoftmaxBackward t, const SoftmaxBias& bias,
                                  const FireTensors& dfire, const Sequences& q,
                                  const SoftmaxParams& p) {
  t.bias = bias;
  t.dfire = dfire;
  run_pack(s, t, q, p);
}
inline void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& q,
                            const RebasedParams& p) {
  run_pack(s, t, q, p);
}
inline void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& q,
                             const RebasedParams& p) {
  run_pack(s, t, q, p);
}
inline void rebased_state(Stream& s, T state, T k, T v, const RebasedParams& p) {
  run(s, RebasedState{state, k, v, p});
}
inline void rebased_decode(Stream& s, RebasedDecode t, const RebasedParams& p) {
  t.params = p;
  run(s, t);
}
struct DecodeTensors {
  Tensor o_BHd;
  Tensor q_BHd;
  Tensor k_cache_BCHd, v_cache_BCHd;
  Tensor gate_cache_BCH{};
  Tensor remainder_bias_Hd{};
  Tensor lengths_B;
};
inline void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& p) {
  run(s, StickBreakingDecode{t.o_BHd, t.q_BHd, t.k_cache_BCHd, t.v_cache_BCHd, t.gate_cache_BCH,
                             t.remainder_bias_Hd, t.lengths_B, p});
}
inline void softmax_bias_decode(Stream& s, const DecodeTensors& t, const SoftmaxBias& bias,
                                const SoftmaxParams& p) {
  run(s, SoftmaxDecode{t.o_BHd, t.q_BHd, t.k_cache_BCHd, t.v_cache_BCHd, t.lengths_B, bias, p});
}
inline void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& p) {
  softmax_bias_decode(s, t, {}, p);
}
inline void cache_append(Stream& s, T cache, T x, T positions) {
  run(s, CacheAppend{cache, x, positions});
}
inline void short_conv_forward(Stream& s, ShortConvForward t, const ShortConvWeights& w) {
  t.w = w;
  run(s, t);
}
inline void short_conv_backward(Stream& s, ShortConvBackward t, const ShortConvWeights& dw,
                                const ShortConvWeights& w) {
  t.dw = dw;
  t.w = w;
  run(s, t);
}
inline void short_conv_decode(Stream& s, ShortConvDecode t, const ShortConvWeights& w) {
  t.w = w;
  run(s, t);
}
inline void linear_cross_entropy(Stream& s, const CrossEntropy& t) {
  run(s, t);
}
inline void add_sum(Stream& s, T y, T x) {
  run(s, AddSum{y, x});
}
inline void add_squared_norm(Stream& s, T y, T x) {
  run(s, AddSquaredNorm{y, x});
}
inline void finish_step(Stream& s, T stats, double clip, double beta1, double beta2) {
  run(s, FinishStep{stats, clip, beta1, beta2});
}
inline void adamw(Stream& s, const AdamW& t) {
  run(s, t);
}

}  // namespace sbtrain::ops
