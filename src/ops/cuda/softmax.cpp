// Softmax attention: by cuDNN where it can, else by the portable kernels (kernels/attention/).
#include "kernels/attention/softmax.h"

#include <spdlog/spdlog.h>

#include "core/error.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/cudnn_attention.h"
#include "ops/cuda/scratch.h"

namespace sbtrain::ops::cuda {
namespace {

// cuDNN for one stream, and what was said about it: each reason once, not in every step.
struct Cudnn : BackendContext {
  explicit Cudnn(bool deterministic) {
    std::string why;
    attention = CudnnAttention::open({.deterministic = deterministic}, &why);
    if (!attention) spdlog::info("Softmax attention runs on the portable kernels: {}", why);
  }
  std::unique_ptr<CudnnAttention> attention;
  bool forward_said = false, backward_said = false;
};

Cudnn& cudnn(const Stream& s) {
  Context& c = context(s);
  if (!c.attention) c.attention = std::make_unique<Cudnn>(s.deterministic());
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

CudnnAttention::Workspace workspace(const Buffer& scratch) {
  const Tensor& t = scratch;
  return {t.data, t.bytes()};
}

// Heads [first, first + heads) of the problem.
kernels::SoftmaxProblem heads_of(kernels::SoftmaxProblem p, int first, int heads) {
  for (kernels::HeadRows* x : {&p.q, &p.k, &p.v, &p.o, &p.dout, &p.dq, &p.dk, &p.dv}) {
    x->data += first * p.head_dim;
  }
  p.lse += static_cast<int64_t>(first) * p.tokens;
  p.heads = heads;
  return p;
}

// False where cuDNN cannot: nothing has been written then that the portable kernels do not write.
bool backward_by_cudnn(const Stream& s, const kernels::SoftmaxProblem& p,
                       const CudnnAttention::Workspace& scratch) {
  Cudnn& library = cudnn(s);
  if (!library.attention ||
      kernels::prefers_portable_backward(p.head_dim, p.max_seqlen, p.window, s.deterministic())) {
    return false;
  }
  const auto group = static_cast<int>(kernels::cudnn_backward_heads(
      p.tokens, p.heads, p.head_dim, p.max_seqlen, p.window, p.dq.stride, s.deterministic()));
  for (int head = 0; head < p.heads; head += group) {
    const std::string why =
        group == 0 ? "the scratch of one head is too much"
                   : library.attention->backward(cuda_stream(s), heads_of(p, head, group), scratch);
    if (!done(why, library.backward_said, "backward")) return false;
  }
  return true;
}

}  // namespace

void softmax_forward(Stream& s, const SoftmaxForward& t, const Sequences& sequences,
                     const SoftmaxParams& params) {
  const Buffer scratch = softmax_forward_scratch(s, t.q_THd.rows(), params.heads);
  const kernels::SoftmaxProblem p = softmax_problem(t, sequences, params);
  Cudnn& library = cudnn(s);
  if (library.attention && done(library.attention->forward(cuda_stream(s), p, workspace(scratch)),
                                library.forward_said, "forward")) {
    return;
  }
  kernels::softmax_forward(cuda_stream(s), p);
}

void softmax_backward(Stream& s, const SoftmaxBackward& t, const Sequences& sequences,
                      const SoftmaxParams& params) {
  const Buffer scratch =
      softmax_backward_scratch(s, t.dq_THd, params.heads, sequences.max_seqlen, params.window);
  const kernels::SoftmaxProblem p = softmax_backward_problem(t, sequences, params);
  if (backward_by_cudnn(s, p, workspace(scratch))) return;
  kernels::softmax_backward(cuda_stream(s), p, workspace(scratch).data);
}

}  // namespace sbtrain::ops::cuda
