// Softmax attention with position biases: checks its tensors, then runs on the stream's backend.
#include <bit>
#include <cmath>

#include "ops/check_attention.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/scratch.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

constexpr DType kF32 = DType::kF32;

void check_fire(std::string_view op, const FireTensors& fire, int heads) {
  check_flat(op, "c_1", fire.c_1, kF32, 1);
  check_flat(op, "m_1", fire.m_1, kF32, 1);
  check_flat(op, "w1_K", fire.w1_K, kF32, kFireHidden);
  check_flat(op, "b1_K", fire.b1_K, kF32, kFireHidden);
  check_flat(op, "w2_HK", fire.w2_HK, kF32, int64_t{heads} * kFireHidden);
  check_flat(op, "b2_H", fire.b2_H, kF32, heads);
}

// What forward and backward pass share; returns the head dimension.
template <typename Tensors>
int64_t check(std::string_view op, const Tensors& t, const SoftmaxBias& bias,
              const Sequences& sequences, const SoftmaxParams& params) {
  const int64_t tokens = t.q_THd.rows();
  const int64_t d = check_heads(op, "q_THd", t.q_THd, tokens, params.heads);
  check_same_shape(op, "k_THd", t.k_THd, t.q_THd);
  check_same_shape(op, "v_THd", t.v_THd, t.q_THd);
  check_same_shape(op, "o_THd", t.o_THd, t.q_THd);
  check_matrix(op, "lse_HT", t.lse_HT, kF32, params.heads, tokens);
  check_documents(op, sequences, tokens);
  if (bias.kind == PositionBias::kFire) check_fire(op, bias.fire, params.heads);
  return d;
}

}  // namespace

float alibi_slope(int heads, int head) {
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(heads)));
  const double exponent =
      head < power ? 8.0 * (head + 1) / power : 8.0 * (2 * (head - power) + 1) / (2.0 * power);
  return static_cast<float>(std::exp2(-exponent));
}

void softmax_bias_forward(Stream& s, const SoftmaxForward& t, const SoftmaxBias& bias,
                          const Sequences& sequences, const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_bias_forward";
  const int64_t d = check(kOp, t, bias, sequences, params);
  dispatch(
      s, kOp, [&] { cpu::softmax_bias_forward(s, t, bias, sequences, params); },
      [&] { cuda::softmax_bias_forward(s, t, bias, sequences, params); },
      [&] {
        on_cuda(s) ? cuda::softmax_bias_forward_scratch(s, bias.kind, t.q_THd.rows(), params.heads,
                                                        sequences.max_seqlen)
                   : cpu::softmax_forward_scratch(s, d);
      });
}

void softmax_bias_backward(Stream& s, const SoftmaxBackward& t, const SoftmaxBias& bias,
                           const FireTensors& dfire, const Sequences& sequences,
                           const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_bias_backward";
  const int64_t d = check(kOp, t, bias, sequences, params);
  check_same_shape(kOp, "dq_THd", t.dq_THd, t.q_THd);
  check_same_shape(kOp, "dk_THd", t.dk_THd, t.q_THd);
  check_same_shape(kOp, "dv_THd", t.dv_THd, t.q_THd);
  check_same_shape(kOp, "do_THd", t.do_THd, t.q_THd);
  if (bias.kind == PositionBias::kFire) check_fire(kOp, dfire, params.heads);
  dispatch(
      s, kOp, [&] { cpu::softmax_bias_backward(s, t, bias, dfire, sequences, params); },
      [&] { cuda::softmax_bias_backward(s, t, bias, dfire, sequences, params); },
      [&] {
        on_cuda(s) ? cuda::softmax_bias_backward_scratch(s, bias.kind, t.q_THd.rows(), params.heads,
                                                         sequences.max_seqlen)
                   : cpu::softmax_backward_scratch(s, d);
      });
}

void softmax_bias_decode(Stream& s, const DecodeTensors& t, const SoftmaxBias& bias,
                         const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_bias_decode";
  const int64_t sequences = t.q_BHd.rows();
  check_heads(kOp, "q_BHd", t.q_BHd, sequences, params.heads);
  check_same_shape(kOp, "o_BHd", t.o_BHd, t.q_BHd);
  require(t.k_cache_BCHd.rank == 3, "{}: the cache has rank {}", kOp, t.k_cache_BCHd.rank);
  const int64_t elements = sequences * t.k_cache_BCHd.shape[1] * t.q_BHd.cols();
  check_flat(kOp, "k_cache_BCHd", t.k_cache_BCHd, kF32, elements);
  check_flat(kOp, "v_cache_BCHd", t.v_cache_BCHd, kF32, elements);
  check_flat(kOp, "lengths_B", t.lengths_B, DType::kI32, sequences);
  if (bias.kind == PositionBias::kFire) check_fire(kOp, bias.fire, params.heads);
  dispatch(
      s, kOp, [&] { cpu::softmax_bias_decode(s, t, bias, params); },
      [&] { cuda::softmax_bias_decode(s, t, bias, params); });
}

}  // namespace sbtrain::ops
