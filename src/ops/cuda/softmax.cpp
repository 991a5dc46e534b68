// Softmax attention: by cuDNN where it can, else by the portable kernels (kernels/attention/).
#include "kernels/attention/softmax.h"

#include <spdlog/spdlog.h>

#include "core/error.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/cudnn_attention.h"
#include "ops/cuda/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

// cuDNN for one stream, and what was said about it: each reason once, not in every step.
struct Cudnn : BackendContext {
  Cudnn() {
    std::string why;
    attention = CudnnAttention::open({.deterministic = kDeterministicSoftmax}, &why);
    if (!attention) spdlog::info("Softmax attention runs on the portable kernels: {}", why);
  }
  std::unique_ptr<CudnnAttention> attention;
  bool forward_said = false, backward_said = false;
};

Cudnn& cudnn(const Stream& s) {
  Context& c = context(s);
  if (!c.attention) c.attention = std::make_unique<Cudnn>();
  return static_cast<Cudnn&>(*c.attention);
}

// Whether cuDNN did it; if not, why is said once.
bool done(const std::string& why, bool& said, const char* pass) {
  if (why.empty()) return true;
  if (!said)
    spdlog::info("Softmax attention's {} pass runs on the portable kernels: {}", pass, why);
  said = true;
  return false;
}

kernels::HeadRows rows(const Tensor& t) {
  auto* const data = reinterpret_cast<__nv_bfloat16*>(t.bf16());
  require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && t.row_stride % 8 == 0,
          "softmax attention: rows must begin at multiples of 16 bytes");
  return {data, t.row_stride};
}

template <typename Tensors>
kernels::SoftmaxProblem problem(const Tensors& t, const Sequences& sequences,
                                const SoftmaxParams& params) {
  const int64_t head_dim = t.q_THd.cols() / params.heads;
  require(head_dim <= 128 && head_dim % 8 == 0,
          "softmax attention on CUDA: the head dimension is {}, not a multiple of 8 up to 128",
          head_dim);
  require(t.lse_HT.contiguous(), "softmax attention: lse has strided rows");
  return {.tokens = static_cast<int>(t.q_THd.rows()),
          .heads = params.heads,
          .head_dim = static_cast<int>(head_dim),
          .scale = params.scale,
          .window = static_cast<int>(params.window),
          .cu_seqlens = sequences.cu_seqlens.i32(),
          .positions = sequences.positions_T.i32(),
          .sequences = static_cast<int>(sequences.count),
          .max_seqlen = static_cast<int>(sequences.max_seqlen),
          .q = rows(t.q_THd),
          .k = rows(t.k_THd),
          .v = rows(t.v_THd),
          .o = rows(t.o_THd),
          .lse = t.lse_HT.f32()};
}

CudnnAttention::Workspace workspace(const Buffer& scratch) {
  const Tensor& t = scratch;
  return {t.data, t.bytes()};
}

}  // namespace

void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params) {
  const Buffer scratch = softmax_forward_scratch(s, t.q_THd.rows(), params.heads);
  const kernels::SoftmaxProblem p = problem(t, sequences, params);
  Cudnn& library = cudnn(s);
  if (library.attention && done(library.attention->forward(cuda_stream(s), p, workspace(scratch)),
                                library.forward_said, "forward")) {
    return;
  }
  SBTRAIN_CUDA_CHECK(kernels::softmax_forward(cuda_stream(s), p));
}

void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params) {
  const Buffer scratch = softmax_backward_scratch(s, t.dq_THd, params.heads, sequences.max_seqlen);
  kernels::SoftmaxProblem p = problem(t, sequences, params);
  p.dout = rows(t.do_THd);
  p.dq = rows(t.dq_THd);
  p.dk = rows(t.dk_THd);
  p.dv = rows(t.dv_THd);
  Cudnn& library = cudnn(s);
  if (library.attention && done(library.attention->backward(cuda_stream(s), p, workspace(scratch)),
                                library.backward_said, "backward")) {
    return;
  }
  SBTRAIN_CUDA_CHECK(kernels::softmax_backward(cuda_stream(s), p, workspace(scratch).data));
}

}  // namespace sbtrain::ops::cuda
