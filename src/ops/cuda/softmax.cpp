// Softmax attention: by the kernels for Hopper or by cuDNN if ops/choose.h chooses them and, in the
// case of cuDNN, it accepts the pack; else by the portable kernels (kernels/attention/).
#include "kernels/attention/softmax.h"

#include "core/log.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/cudnn_attention.h"

namespace sbtrain::ops::cuda {
namespace {

// cuDNN for one stream.
struct Cudnn : BackendContext {
  explicit Cudnn(bool deterministic) : attention(CudnnAttention::open(deterministic, &why)) {}
  std::string why;  // why cuDNN is not available
  std::unique_ptr<CudnnAttention> attention;
};

Cudnn& cudnn(const Stream& s) {
  Context& c = context(s);
  if (!c.attention) c.attention = std::make_unique<Cudnn>(s.deterministic());
  return static_cast<Cudnn&>(*c.attention);
}

template <typename Op>
kernels::SoftmaxProblem problem(const Op& op) {
  require(op.lse_HT.contiguous(), "softmax attention: lse has strided rows");
  auto p = attention_problem<kernels::SoftmaxProblem>(op);
  p.window = static_cast<int>(op.params.window);
  p.max_seqlen = static_cast<int>(op.sequences.max_seqlen);
  p.lse = op.lse_HT;
  return p;
}

// The problem for heads [first, first + heads), which are whole groups.
kernels::SoftmaxProblem heads_of(kernels::SoftmaxProblem p, int first, int heads) {
  for (kernels::HeadRows* x : {&p.q, &p.o, &p.dout, &p.dq}) x->data += first * p.head_dim;
  for (kernels::HeadRows* x : {&p.k, &p.v, &p.dk, &p.dv}) {
    x->data += first / p.group * p.head_dim;
  }
  p.lse += static_cast<int64_t>(first) * p.tokens;
  p.heads = heads;
  return p;
}

// Returns an empty string if cuDNN computed the problem, else the reason why not. In the latter
// case nothing has been written that the portable kernels do not overwrite.
std::string by_cudnn(const Stream& s, const kernels::SoftmaxProblem& p,
                     const AttentionChoice& choice, const Tensor& scratch, bool backward) {
  if (choice.implementation != Implementation::kCudnn) return choice.reason;
  Cudnn& library = cudnn(s);
  if (!library.attention) return library.why;
  const auto part = static_cast<int>(choice.heads);  // all of them in the forward pass
  for (int head = 0; head < p.heads; head += part) {
    std::string why =
        library.attention->run(cuda_stream(s), heads_of(p, head, part), scratch, backward);
    if (!why.empty()) return why;
  }
  return "";
}

// Returns whether cuDNN computed the problem. Logs once for each op and shape which one runs.
bool done_by_cudnn(const Stream& s, std::string_view op, const kernels::SoftmaxProblem& p,
                   const AttentionChoice& choice, const Tensor& scratch, bool backward) {
  const std::string why = by_cudnn(s, p, choice, scratch, backward);
  const bool window = p.window > 0;
  if (context(s).said.insert({op, p.heads, p.head_dim, window, why}).second) {
    log_info("{} of {} heads of {} channels{} runs on {}{}", op, p.heads, p.head_dim,
             window ? " in a window" : "", why.empty() ? "cuDNN" : "the portable kernels: ", why);
  }
  return why.empty();
}

template <typename Op>
void run_chosen(const Stream& s, const Op& op, const AttentionScratch& scratch) {
  constexpr bool kBackward = std::is_same_v<Op, SoftmaxBackward>;
  const kernels::SoftmaxProblem p = problem(op);
  const Tensor& space = scratch.buffer;
  const bool hopper = scratch.choice.implementation == Implementation::kHopper;
  if (!hopper && done_by_cudnn(s, op.kName, p, scratch.choice, space, kBackward)) return;
  void* const scheduler = static_cast<std::byte*>(space.data) + scratch.choice.hopper_part;
  with_bias(op, [&](const auto&... bias) {
    if constexpr (kBackward) {
      hopper ? kernels::softmax_backward_hopper(cuda_stream(s), p, space.data, scheduler, bias...)
             : kernels::softmax_backward(cuda_stream(s), p, space.data, bias...);
    } else {
      hopper ? kernels::softmax_forward_hopper(cuda_stream(s), p, space.data, scheduler, bias...)
             : kernels::softmax_forward(cuda_stream(s), p, space.data, bias...);
    }
  });
}

}  // namespace

void run(Cuda, Stream& s, const SoftmaxForward& op, const AttentionScratch& scratch) {
  run_chosen(s, op, scratch);
}
void run(Cuda, Stream& s, const SoftmaxBackward& op, const AttentionScratch& scratch) {
  run_chosen(s, op, scratch);
}

}  // namespace sbtrain::ops::cuda
