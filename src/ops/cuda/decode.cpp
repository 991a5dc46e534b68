#include "kernels/decode.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::Decode arguments(const DecodeTensors& t, int heads, float scale) {
  return {.o = bf16(t.o_BHd),
          .o_stride = t.o_BHd.row_stride,
          .q = bf16(t.q_BHd),
          .q_stride = t.q_BHd.row_stride,
          .k_cache = bf16(t.k_cache_BCHd),
          .v_cache = bf16(t.v_cache_BCHd),
          .lengths = t.lengths_B.i32(),
          .batch = t.q_BHd.rows(),
          .capacity = t.k_cache_BCHd.shape[1],
          .heads = heads,
          .head_dim = static_cast<int>(t.q_BHd.cols() / heads),
          .scale = scale};
}

}  // namespace

void cache_append(Stream& s, Tensor cache_BCN, Tensor x_BN, Tensor positions_B) {
  kernels::cache_append(cuda_stream(s), {.type = kernel_type(cache_BCN.dtype),
                                         .cache = cache_BCN.data,
                                         .x = x_BN.data,
                                         .x_stride = x_BN.row_stride,
                                         .positions = positions_B.i32(),
                                         .batch = cache_BCN.shape[0],
                                         .capacity = cache_BCN.shape[1],
                                         .cols = cache_BCN.shape[2]});
}

void softmax_decode(Stream& s, const DecodeTensors& t, const SoftmaxParams& params) {
  kernels::softmax_decode(cuda_stream(s),
                          {.t = arguments(t, params.heads, params.scale), .window = params.window});
}

void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params) {
  const bool bias = params.remainder == Remainder::kBias;
  kernels::stickbreaking_decode(
      cuda_stream(s), {.t = arguments(t, params.heads, params.scale),
                       .gate_cache = t.gate_cache_BCH.defined() ? t.gate_cache_BCH.f32() : nullptr,
                       .remainder_bias = bias ? bf16(t.remainder_bias_Hd) : nullptr,
                       .remainder_value = params.remainder == Remainder::kValue,
                       .attend_current = params.attend_current,
                       .skip_epsilon = params.skip_epsilon});
}

}  // namespace sbtrain::ops::cuda
