// Softmax attention whose logits know the distance of query and key:
//   o_j = sum_i softmax_i(scale q_j.k_i + bias_h(i, j)) v_i
// with i and j counted from 0 in each document. Otherwise the ops are those of ops.h.
#pragma once

#include "ops/ops.h"

namespace sbtrain::ops {

enum class PositionBias : uint8_t {
  kAlibi,  // -m_h (j - i)  (arXiv 2108.12409)
  kFire,   // MLP(psi(j - i) / (psi(max(j, |m L0|)) + 1e-6))_h, psi(x) = log(|c| x + 1), and the MLP
           // is 1 -> 32 -> H with ReLU  (arXiv 2310.04418)
};
inline constexpr int kFireHidden = 32;
inline constexpr float kFireLength = 512.0f;  // L0
inline constexpr float kFireEps = 1e-6f;

// m_h: 2^(-8h/P), h = 1..P, for P = 2^floor(log2 H) heads; the others take 2^(-8(2k-1)/(2P)),
// k = 1..H-P. `head` counts from 0.
float alibi_slope(int heads, int head);

// The tensors of FIRE: its parameters or, f32, their gradients. K = kFireHidden.
struct FireTensors {
  Tensor c_1, m_1, w1_K, b1_K, w2_HK, b2_H;
};
struct SoftmaxBias {
  PositionBias kind = PositionBias::kAlibi;
  FireTensors fire{};  // with kFire
};

void softmax_bias_forward(Stream& s, const SoftmaxForward& t, const SoftmaxBias& bias,
                          const Sequences& sequences, const SoftmaxParams& params);
// dfire += gradients of bias.fire, with kFire.
void softmax_bias_backward(Stream& s, const SoftmaxBackward& t, const SoftmaxBias& bias,
                           const FireTensors& dfire, const Sequences& sequences,
                           const SoftmaxParams& params);
void softmax_bias_decode(Stream& s, const DecodeTensors& t, const SoftmaxBias& bias,
                         const SoftmaxParams& params);

}  // namespace sbtrain::ops
