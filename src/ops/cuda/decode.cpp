#include "ops/cuda/decode.h"

#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"

namespace sbtrain::ops::cuda {
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
  kernels::softmax_decode(cuda_stream(s), {.t = decode_arguments(t, params.heads, params.scale),
                                           .window = params.window});
}

void stickbreaking_decode(Stream& s, const DecodeTensors& t, const StickBreakingParams& params) {
  const bool bias = params.remainder == Remainder::kBias;
  kernels::stickbreaking_decode(
      cuda_stream(s), {.t = decode_arguments(t, params.heads, params.scale),
                       .gate_cache = t.gate_cache_BCH.defined() ? t.gate_cache_BCH.f32() : nullptr,
                       .remainder_bias = bias ? bf16(t.remainder_bias_Hd) : nullptr,
                       .remainder_value = params.remainder == Remainder::kValue,
                       .attend_current = params.attend_current,
                       .skip_epsilon = params.skip_epsilon});
}

}  // namespace sbtrain::ops::cuda
