// The attention ops: checks their tensors, then runs them on the stream's backend.
#include "ops/check.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/scratch.h"
#include "ops/ops.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kI32 = DType::kI32;

// The head dimension of q [T, H*d].
int64_t head_dim(std::string_view op, const Tensor& q, int heads) {
  require(q.rank == 2 && heads > 0 && q.cols() % heads == 0, "{}: q is {}, not [T, {} heads * d]",
          op, q.describe(), heads);
  return q.cols() / heads;
}

void check_sequences(std::string_view op, const Sequences& sequences, int64_t tokens) {
  const Tensor& bounds = sequences.cu_seqlens;
  require(bounds.defined() && bounds.dtype == kI32 && bounds.contiguous() &&
              bounds.numel() > sequences.count && sequences.count >= 0,
          "{}: cu_seqlens must be i32 with at least {} elements, got {}", op, sequences.count + 1,
          bounds.describe());
  require(tokens == 0 || sequences.max_seqlen > 0, "{}: max_seqlen is {}", op,
          sequences.max_seqlen);
}

template <typename Tensors>
void check_qkv(std::string_view op, const Tensors& t) {
  check_matrix(op, "q_THd", t.q_THd, kF32, t.q_THd.rows(), t.q_THd.cols());
  check_same_shape(op, "k_THd", t.k_THd, t.q_THd);
  check_same_shape(op, "v_THd", t.v_THd, t.q_THd);
}

template <typename Tensors>
void check_gradients(std::string_view op, const Tensors& t) {
  check_same_shape(op, "dq_THd", t.dq_THd, t.q_THd);
  check_same_shape(op, "dk_THd", t.dk_THd, t.q_THd);
  check_same_shape(op, "dv_THd", t.dv_THd, t.q_THd);
  check_same_shape(op, "do_THd", t.do_THd, t.q_THd);
}

template <typename Tensors>
void check_stickbreaking(std::string_view op, const Tensors& t, const StickBreakingParams& params) {
  const int64_t tokens = t.q_THd.rows();
  check_matrix(op, "log2_rem_HT", t.log2_rem_HT, kF32, params.heads, tokens);
  check_matrix(op, "stop_HT", t.stop_HT, kI32, params.heads, tokens);
  if (t.gate_TH.defined()) check_matrix(op, "gate_TH", t.gate_TH, kF32, tokens, params.heads);
  if (params.remainder == Remainder::kBias) {
    check_flat(op, "remainder_bias_Hd", t.remainder_bias_Hd, kF32, t.q_THd.cols());
  }
}

void check_decode(std::string_view op, const DecodeTensors& t, int heads) {
  const int64_t sequences = t.q_BHd.rows();
  const int64_t width = t.q_BHd.cols();
  head_dim(op, t.q_BHd, heads);
  check_matrix(op, "q_BHd", t.q_BHd, kF32, sequences, width);
  check_same_shape(op, "o_BHd", t.o_BHd, t.q_BHd);
  require(t.k_cache_BCHd.rank == 3, "{}: k_cache_BCHd is {}", op, t.k_cache_BCHd.describe());
  const int64_t capacity = t.k_cache_BCHd.shape[1];
  check_flat(op, "k_cache_BCHd", t.k_cache_BCHd, kF32, sequences * capacity * width);
  check_flat(op, "v_cache_BCHd", t.v_cache_BCHd, kF32, sequences * capacity * width);
  check_flat(op, "lengths_B", t.lengths_B, kI32, sequences);
}

}  // namespace

void stickbreaking_forward(Stream& s, const StickBreakingForward& t, const Sequences& sequences,
                           const StickBreakingParams& params) {
  constexpr std::string_view kOp = "stickbreaking_forward";
  const int64_t d = head_dim(kOp, t.q_THd, params.heads);
  check_qkv(kOp, t);
  check_same_shape(kOp, "o_THd", t.o_THd, t.q_THd);
  check_stickbreaking(kOp, t, params);
  check_sequences(kOp, sequences, t.q_THd.rows());
  dispatch(
      s, kOp, [&] { cpu::stickbreaking_forward(s, t, sequences, params); },
      [&] { cuda::stickbreaking_forward(s, t, sequences, params); },
      [&] {
        if (!on_cuda(s)) cpu::stickbreaking_forward_scratch(s, d);
      });
}

void stickbreaking_backward(Stream& s, const StickBreakingBackward& t, const Sequences& sequences,
                            const StickBreakingParams& params) {
  constexpr std::string_view kOp = "stickbreaking_backward";
  const int64_t d = head_dim(kOp, t.q_THd, params.heads);
  check_qkv(kOp, t);
  check_gradients(kOp, t);
  check_stickbreaking(kOp, t, params);
  if (t.gate_TH.defined()) check_same_shape(kOp, "dgate_TH", t.dgate_TH, t.gate_TH);
  if (params.remainder == Remainder::kBias) {
    check_flat(kOp, "dremainder_bias_Hd", t.dremainder_bias_Hd, kF32, t.q_THd.cols());
  }
  check_sequences(kOp, sequences, t.q_THd.rows());
  dispatch(
      s, kOp, [&] { cpu::stickbreaking_backward(s, t, sequences, params); },
      [&] { cuda::stickbreaking_backward(s, t, sequences, params); },
      [&] {
        on_cuda(s) ? cuda::stickbreaking_backward_scratch(s, t.q_THd.rows(), params.heads,
                                                          sequences.max_seqlen)
                   : cpu::stickbreaking_backward_scratch(s, d, sequences.max_seqlen);
      });
}

void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params) {
  constexpr std::string_view kOp = "stickbreaking_decode";
  check_decode(kOp, t, params.heads);
  if (t.gate_cache_BCH.defined()) {
    check_flat(kOp, "gate_cache_BCH", t.gate_cache_BCH, kF32,
               t.q_BHd.rows() * t.k_cache_BCHd.shape[1] * params.heads);
  }
  if (params.remainder == Remainder::kBias) {
    check_flat(kOp, "remainder_bias_Hd", t.remainder_bias_Hd, kF32, t.q_BHd.cols());
  }
  dispatch(
      s, kOp, [&] { cpu::stickbreaking_decode(s, t, params); },
      [&] { cuda::stickbreaking_decode(s, t, params); });
}

void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_forward";
  const int64_t d = head_dim(kOp, t.q_THd, params.heads);
  check_qkv(kOp, t);
  check_same_shape(kOp, "o_THd", t.o_THd, t.q_THd);
  check_matrix(kOp, "lse_HT", t.lse_HT, kF32, params.heads, t.q_THd.rows());
  check_sequences(kOp, sequences, t.q_THd.rows());
  dispatch(
      s, kOp, [&] { cpu::softmax_forward(s, t, sequences, params); },
      [&] { cuda::softmax_forward(s, t, sequences, params); },
      [&] {
        if (on_cuda(s)) {
          cuda::softmax_forward_scratch(s, t.q_THd.rows(), params.heads);
        } else {
          cpu::softmax_forward_scratch(s, d);
        }
      });
}

void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_backward";
  const int64_t d = head_dim(kOp, t.q_THd, params.heads);
  check_qkv(kOp, t);
  check_gradients(kOp, t);
  check_same_shape(kOp, "o_THd", t.o_THd, t.q_THd);
  check_matrix(kOp, "lse_HT", t.lse_HT, kF32, params.heads, t.q_THd.rows());
  check_sequences(kOp, sequences, t.q_THd.rows());
  dispatch(
      s, kOp, [&] { cpu::softmax_backward(s, t, sequences, params); },
      [&] { cuda::softmax_backward(s, t, sequences, params); },
      [&] {
        if (on_cuda(s)) {
          cuda::softmax_backward_scratch(s, t.dq_THd, params.heads, sequences.max_seqlen,
                                         params.window);
        } else {
          cpu::softmax_backward_scratch(s, d);
        }
      });
}

void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params) {
  constexpr std::string_view kOp = "softmax_decode";
  check_decode(kOp, t, params.heads);
  dispatch(
      s, kOp, [&] { cpu::softmax_decode(s, t, params); },
      [&] { cuda::softmax_decode(s, t, params); });
}

void cache_append(Stream& s, Tensor cache_BCN, Tensor x_BN, Tensor positions_B) {
  constexpr std::string_view kOp = "cache_append";
  require(cache_BCN.rank == 3 && cache_BCN.contiguous(), "{}: the cache is {}", kOp,
          cache_BCN.describe());
  check_matrix(kOp, "x_BN", x_BN, kF32, cache_BCN.shape[0], cache_BCN.shape[2]);
  require(x_BN.dtype == cache_BCN.dtype, "{}: {} go into a cache of {}", kOp,
          dtype_name(x_BN.dtype), dtype_name(cache_BCN.dtype));
  check_flat(kOp, "positions_B", positions_B, kI32, x_BN.rows());
  dispatch(
      s, kOp, [&] { cpu::cache_append(s, cache_BCN, x_BN, positions_B); },
      [&] { cuda::cache_append(s, cache_BCN, x_BN, positions_B); });
}

}  // namespace sbtrain::ops
