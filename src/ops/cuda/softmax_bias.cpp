#include "kernels/attention/softmax_bias.h"

#include "kernels/decode.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/decode.h"
#include "ops/cuda/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

static_assert(kFireHidden == kernels::kFireUnits);

kernels::AlibiSlopes alibi_slopes(int heads) {
  if (heads > kernels::kMaxAlibiHeads) {
    fail(ExitCode::kConfig, "ALiBi on CUDA: {} heads, at most {}", heads, kernels::kMaxAlibiHeads);
  }
  kernels::AlibiSlopes slopes{};
  for (int h = 0; h < heads; ++h) slopes.of_head[h] = alibi_slope(heads, h);
  return slopes;
}

kernels::FireParameters parameters(const FireTensors& fire) {
  return {.c = bf16(fire.c_1),
          .m = bf16(fire.m_1),
          .w1 = bf16(fire.w1_K),
          .b1 = bf16(fire.b1_K),
          .w2 = bf16(fire.w2_HK),
          .b2 = bf16(fire.b2_H)};
}

kernels::FireGradients gradients(const FireTensors& dfire) {
  return {.c = dfire.c_1.f32(),
          .m = dfire.m_1.f32(),
          .w1 = dfire.w1_K.f32(),
          .b1 = dfire.b1_K.f32(),
          .w2 = dfire.w2_HK.f32()};
}

}  // namespace

void softmax_bias_forward(Stream& s, const SoftmaxForward& t, const SoftmaxBias& bias,
                          const Sequences& sequences, const SoftmaxParams& params) {
  const kernels::SoftmaxProblem p = softmax_problem(t, sequences, params);
  const Buffer scratch =
      softmax_bias_forward_scratch(s, bias.kind, p.tokens, p.heads, sequences.max_seqlen);
  if (bias.kind == PositionBias::kAlibi) {
    kernels::alibi_forward(cuda_stream(s), p, alibi_slopes(params.heads));
  } else {
    kernels::fire_forward(cuda_stream(s), p, parameters(bias.fire), scratch.tensor().data);
  }
}

void softmax_bias_backward(Stream& s, const SoftmaxBackward& t, const SoftmaxBias& bias,
                           const FireTensors& dfire, const Sequences& sequences,
                           const SoftmaxParams& params) {
  const kernels::SoftmaxProblem p = softmax_backward_problem(t, sequences, params);
  const Buffer scratch =
      softmax_bias_backward_scratch(s, bias.kind, p.tokens, p.heads, sequences.max_seqlen);
  void* const data = scratch.tensor().data;
  if (bias.kind == PositionBias::kAlibi) {
    kernels::alibi_backward(cuda_stream(s), p, alibi_slopes(params.heads), data);
  } else {
    kernels::fire_backward(cuda_stream(s), p, parameters(bias.fire), gradients(dfire), data);
  }
}

void softmax_bias_decode(Stream& s, const DecodeTensors& t, const SoftmaxBias& bias,
                         const SoftmaxParams& params) {
  const kernels::SoftmaxDecode p{.t = decode_arguments(t, params.heads, params.scale),
                                 .window = params.window};
  if (bias.kind == PositionBias::kAlibi) {
    kernels::alibi_decode(cuda_stream(s), p, alibi_slopes(params.heads));
  } else {
    kernels::fire_decode(cuda_stream(s), p, parameters(bias.fire));
  }
}

}  // namespace sbtrain::ops::cuda
