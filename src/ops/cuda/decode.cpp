#include "kernels/decode.h"

#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"
#include "ops/cuda/position_bias.h"

namespace sbtrain::ops::cuda {
namespace {

template <typename Op>
kernels::Decode decode_arguments(Stream& s, const Op& op, const Buffer& scratch) {
  const int64_t head_dim = op.q_BHd.cols() / op.params.heads;
  return {.o = arg(op.o_BHd),
          .q = arg(op.q_BHd),
          .k = arg(op.k_BGd),
          .v = arg(op.v_BGd),
          .k_cache = arg(op.k_cache_BCGd),
          .v_cache = arg(op.v_cache_BCGd),
          .lengths = arg(op.lengths_B),
          .batch = op.q_BHd.rows(),
          .capacity = op.k_cache_BCGd.shape[1],
          .heads = op.params.heads,
          .key_heads = static_cast<int>(op.k_cache_BCGd.shape[2] / head_dim),
          .head_dim = static_cast<int>(head_dim),
          .scale = op.params.scale,
          .scratch = arg(scratch),
          .arrived = context(s).counters(),
          .early = begins_early(s)};
}

}  // namespace

void run(Cuda, Stream& s, const CacheAppend& op) {
  kernels::cache_append(cuda_stream(s), {.type = kernel_type(op.cache_BCN.dtype),
                                         .cache = op.cache_BCN.data,
                                         .x = arg(op.x_BN),
                                         .positions = arg(op.positions_B),
                                         .batch = op.cache_BCN.shape[0],
                                         .capacity = op.cache_BCN.shape[1],
                                         .cols = op.cache_BCN.shape[2]});
}

void run(Cuda, Stream& s, const SoftmaxDecode& op, const Buffer& scratch) {
  const kernels::SoftmaxDecode p{.t = decode_arguments(s, op, scratch), .window = op.params.window};
  switch (op.bias.kind) {
    case PositionBias::kNone:
      return kernels::softmax_decode(cuda_stream(s), p);
    case PositionBias::kAlibi:
      return kernels::alibi_decode(cuda_stream(s), p, alibi_slopes(op.params.heads));
    case PositionBias::kFire:
      return kernels::fire_decode(cuda_stream(s), p, fire_parameters(op.bias.fire));
  }
}

void run(Cuda, Stream& s, const StickBreakingDecode& op, const Buffer& scratch) {
  const StickBreakingParams& params = op.params;
  const bool bias = params.remainder == Remainder::kBias;
  kernels::stickbreaking_decode(cuda_stream(s),
                                {.t = decode_arguments(s, op, scratch),
                                 .gate_cache = arg(op.gate_cache_BCH),
                                 .remainder_bias = arg(bias ? op.remainder_bias_Hd : Tensor()),
                                 .remainder_value = params.remainder == Remainder::kValue,
                                 .attend_current = params.attend_current,
                                 .skip_epsilon = params.skip_epsilon});
}

}  // namespace sbtrain::ops::cuda
