#include "kernels/decode.h"

#include "ops/cuda/attention.h"
#include "ops/kept_keys.h"

namespace sbtrain::ops::cuda {
namespace {

template <typename Op>
kernels::Decode decode_parameters(Stream& s, const Op& op, const Buffer& scratch) {
  const int64_t head_dim = op.q_BHd.cols() / op.params.heads;
  return {.o = op.o_BHd,
          .q = op.q_BHd,
          .k = op.k_BGd,
          .v = op.v_BGd,
          .k_cache = op.k_cache_BCGd,
          .v_cache = op.v_cache_BCGd,
          .lengths = op.lengths_B,
          .batch = op.q_BHd.rows(),
          .capacity = op.k_cache_BCGd.shape[1],
          .heads = op.params.heads,
          .key_heads = static_cast<int>(op.k_cache_BCGd.shape[2] / head_dim),
          .head_dim = static_cast<int>(head_dim),
          .scale = op.params.scale,
          .scratch = scratch.tensor(),
          .arrived = context(s).counters(),
          .early = begins_early(s)};
}

}  // namespace

void run(Cuda, Stream& s, const SoftmaxDecode& op, const Buffer& scratch) {
  with_bias(op, [&](const auto&... bias) {
    kernels::softmax_decode(cuda_stream(s), {decode_parameters(s, op, scratch), op.params.window},
                            bias...);
  });
}

void run(Cuda, Stream& s, const StickBreakingDecode& op, const Buffer& scratch) {
  const StickBreakingParams& params = op.params;
  const bool bias = params.remainder == Remainder::kBias;
  kernels::stickbreaking_decode(cuda_stream(s),
                                {.t = decode_parameters(s, op, scratch),
                                 .gate_cache = op.gate_cache_BCH,
                                 .remainder_bias = bias ? op.remainder_bias_Hd : Tensor(),
                                 .remainder_value = params.remainder == Remainder::kValue,
                                 .attend_current = params.attend_current,
                                 .skip_epsilon = params.skip_epsilon});
}

// Begins when PlaceKeys has ended, which is launched plainly.
void run(Cuda, Stream& s, const StickBreakingKeptDecode& op, const Buffer& scratch) {
  const StickBreakingParams& params = op.params;
  const bool bias = params.remainder == Remainder::kBias;
  kernels::stickbreaking_decode(cuda_stream(s),
                                {.t = {.o = op.o_BHd,
                                       .q = op.q_BHd,
                                       .k = op.k_BGd,
                                       .v = op.v_BGd,
                                       .k_cache = nullptr,
                                       .v_cache = nullptr,
                                       .lengths = op.lengths_BG,
                                       .batch = op.q_BHd.rows(),
                                       .capacity = op.capacity(),
                                       .heads = params.heads,
                                       .key_heads = static_cast<int>(op.pages_BGM.shape[1]),
                                       .head_dim = static_cast<int>(op.q_BHd.cols() / params.heads),
                                       .scale = params.scale,
                                       .scratch = scratch.tensor(),
                                       .arrived = context(s).counters(),
                                       .pages = key_pages(op.pages_BGM),
                                       .early = false},
                                 .gate_cache = nullptr,
                                 .remainder_bias = bias ? op.remainder_bias_Hd : Tensor(),
                                 .remainder_value = params.remainder == Remainder::kValue,
                                 .attend_current = params.attend_current,
                                 .skip_epsilon = params.skip_epsilon});
}

}  // namespace sbtrain::ops::cuda
