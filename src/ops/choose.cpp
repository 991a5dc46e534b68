#include "ops/choose.h"

#include <fmt/format.h>

#include <type_traits>

#include "core/build_options.h"
#include "core/error.h"
#include "core/log.h"
#include "kernels/attention/hopper_shapes.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/limits.h"
#include "ops/far_softmax.h"

namespace sbtrain::ops {
namespace {

using kernels::heads_at_a_time;

// The number of heads that cuDNN's backward pass computes at a time, so that its scratch fits; 0 if
// not even one head fits.
int64_t cudnn_backward_heads(const SoftmaxShape& x) {
  for (int64_t part = x.heads; part > 0; --part) {
    if (x.heads % part == 0 && cudnn_scratch_bytes(x, part) <= kMaxCudnnScratch) return part;
  }
  return 0;
}

// Why the portable kernels are faster in the backward pass on an H200, or empty if they are not.
// They are faster for narrow heads (147 against 122 TFLOP/s for d = 32, L = 2048, deterministic),
// and where cuDNN's deterministic algorithm, which also computes what a window hides, would compute
// at least twice (64 channels) or four times (128) what is needed.
std::string_view slow_cudnn_backward(const SoftmaxShape& x) {
  if (x.head_dim <= 32) return "they are faster for heads of 32 channels and fewer";
  const int64_t narrow = x.head_dim <= 64 ? x.max_seqlen / 2 : x.max_seqlen / 4;
  if (x.deterministic && x.window > 0 && x.window <= narrow) {
    return "they are faster for a window this narrow";
  }
  return {};
}

// Why cuDNN cannot or should not compute the problem; empty if it should.
std::string why_not_cudnn(const SoftmaxShape& x, const Target& target, bool forced) {
  if (x.bias != PositionBias::kNone) return "cuDNN has no such bias";
  // In version 9.14 some of its plans for packs end there with an illegal memory access.
  if (x.group > 1) return "cuDNN is not used where heads share keys and values";
  if (target.cudnn == 0) return "the target has no cuDNN";
  if (x.head_dim > kernels::kSmallHeadDim) return "cuDNN is used for heads of up to 128 channels";
  if (!x.backward) return {};
  if (const auto slow = slow_cudnn_backward(x); !forced && !slow.empty()) return std::string(slow);
  if (cudnn_backward_heads(x) == 0) return "cuDNN wants too much scratch for one head";
  return {};
}

size_t portable_scratch_bytes(const SoftmaxShape& x) {
  if (x.bias == PositionBias::kFire) {
    return kernels::fire_scratch(x.tokens, x.heads, x.head_dim, x.max_seqlen, x.backward).bytes;
  }
  return x.backward ? kernels::softmax_backward_scratch_bytes(x.tokens, x.heads) : 0;
}

// Whether `forced` names the implementation. A name that no implementation has is a usage error.
bool forces(std::string_view forced, Implementation implementation) {
  if (!forced.empty() && forced != implementation_name(Implementation::kPortable) &&
      forced != implementation_name(Implementation::kCudnn) &&
      forced != implementation_name(Implementation::kHopper)) {
    fail(ExitCode::kUsage, "'{}' is no implementation; there are portable, cudnn and hopper",
         forced);
  }
  return forced == implementation_name(implementation);
}

// Says once for each architecture after Hopper that it has no attention kernels of its own.
void say_that_none_is_its_own(const Target& target) {
  if (target.sm < 90) return;
  log_info_once(
      "attention runs on the portable kernels and cuDNN: those for Hopper need wgmma, which a GPU "
      "of compute capability {}.{} lacks",
      target.sm / 10, target.sm % 10);
}

// Why the kernels for Hopper cannot compute the problem; empty if they can.
template <typename Shape>
std::string why_not_hopper(const Shape& x, const Target& target) {
  if (!target.has_wgmma()) {
    say_that_none_is_its_own(target);
    return "they need a GPU with wgmma, of compute capability 9.0";
  }
  if (SBTRAIN_WITHOUT_SM90A) return "the build is without 90a-real in CMAKE_CUDA_ARCHITECTURES";
  if (!kernels::hopper_takes_heads(x.head_dim)) {
    return "they take heads of 32, 64 or 128 channels";
  }
  if (!kernels::hopper_takes_packs(x.tokens)) {
    return fmt::format("they take packs of at least {} tokens", kernels::kHopperTokens);
  }
  if constexpr (requires { x.bias; }) {
    if (x.backward && x.group > 1 && x.bias != PositionBias::kNone)
      return "they have no gradient of a bias where heads share keys";
  }
  if constexpr (requires { x.gated; }) {
    if (x.far && x.gated) return "they have no gates of the keys of other ranks";
  }
  return {};
}

// The same, but throws if they are asked for and cannot.
template <typename Shape>
std::string why_not_hopper(const Shape& x, const Target& target, std::string_view forced) {
  std::string why = why_not_hopper(x, target);
  if (!why.empty() && forces(forced, Implementation::kHopper)) {
    fail(ExitCode::kUsage, "the kernels for hopper are asked for, but {}", why);
  }
  return why;
}

// Whether softmax attention on the kernels for Hopper is faster than on all others. Where two are
// equal on documents of one length, documents of many lengths decide: cuDNN's deterministic
// backward pass has no scratch for them.
bool fastest_on_hopper(const SoftmaxShape& x) {
  switch (x.bias) {
    case PositionBias::kAlibi:
      return kernels::alibi_is_faster_on_hopper(x.head_dim, x.max_seqlen);
    case PositionBias::kFire:
      return kernels::fire_is_faster_on_hopper(x.head_dim, x.max_seqlen, x.backward);
    case PositionBias::kNone:
      break;
  }
  if (!kernels::plain_is_faster_on_hopper(x.head_dim, x.max_seqlen, x.backward)) return false;
  if (x.head_dim == 32 || x.group > 1) return true;
  if (x.backward) return x.deterministic;
  return x.head_dim == 64 && x.window == 0 && x.max_seqlen <= 8192;
}

// The implementation, and why it is not the kernels for Hopper.
AttentionChoice choose_implementation(const StickBreakingShape& x, const Target& target,
                                      std::string_view forced) {
  if (forces(forced, Implementation::kCudnn)) {
    fail(ExitCode::kUsage, "cudnn is asked for, but it has no stick-breaking attention");
  }
  if (forces(forced, Implementation::kPortable)) {
    return {.reason = "the portable ones are asked for"};
  }
  std::string why_not = why_not_hopper(x, target, forced);
  if (why_not.empty()) return {.implementation = Implementation::kHopper};
  return {.reason = std::move(why_not)};
}

void plan_far_backward(const StickBreakingShape& x, AttentionChoice& choice) {
  const bool hopper = choice.implementation == Implementation::kHopper;
  choice.single_pass = hopper && x.group == 1 &&
                       kernels::takes_single_pass(x.tokens, x.heads, x.head_dim, x.group, false);
  if (choice.single_pass) {
    const kernels::StickSinglePassScratch scratch =
        kernels::stickbreaking_single_pass_scratch(x.tokens, x.heads, x.head_dim, /*gated=*/false);
    choice.heads = scratch.heads;
    choice.bytes = scratch.bytes;
    return;
  }
  const kernels::StickFarScratch scratch =
      kernels::stickbreaking_far_scratch(hopper, x.tokens, x.heads, x.group);
  choice.heads = scratch.heads;
  choice.blocks = scratch.blocks;
  choice.tokens = scratch.tokens;
  choice.bytes = scratch.bytes;
}

void plan_backward(const StickBreakingShape& x, AttentionChoice& choice) {
  if (x.far) return plan_far_backward(x, choice);
  const kernels::StickBackwardPlan plan = kernels::stickbreaking_backward_plan(
      {.hopper = choice.implementation == Implementation::kHopper,
       .tokens = x.tokens,
       .heads = x.heads,
       .head_dim = x.head_dim,
       .max_seqlen = x.max_seqlen,
       .group = x.group,
       .gated = x.gated,
       .learned_remainder = x.learned_remainder});
  choice.heads = plan.heads;
  choice.blocks = plan.blocks;
  choice.tokens = plan.tokens;
  choice.key_sums = plan.key_sums;
  choice.single_pass = plan.single_pass;
  choice.bytes = plan.bytes;
}

}  // namespace

std::string_view implementation_name(Implementation implementation) {
  switch (implementation) {
    case Implementation::kPortable:
      return "portable";
    case Implementation::kCudnn:
      return "cudnn";
    case Implementation::kHopper:
      return "hopper";
  }
  return {};
}

// Derived from the graphs of cuDNN's frontend, plus a margin for the descriptors of each document;
// NVIDIA does not document it. What a plan really needs is compared with the scratch before it
// runs. The backward pass's deterministic algorithm keeps dS of the whole padded batch, bf16 [B, H,
// S, S]; the other one adds up dq in f32, laid out like dq.
size_t cudnn_workspace_bytes(const SoftmaxShape& x, int64_t heads, int64_t batch) {
  const size_t margin = (size_t{4} << 20) + static_cast<size_t>(batch) * 4096;
  if (!x.backward) return margin;
  const int64_t rows = (x.max_seqlen + 127) / 128 * 128;
  const int64_t scores = batch * heads * rows * rows * 2;
  const int64_t sums = x.tokens * x.dq_stride * static_cast<int64_t>(sizeof(float));
  return static_cast<size_t>(x.deterministic ? scores : sums) +
         cudnn_statistics_bytes(x.tokens, heads) + margin;
}

size_t cudnn_scratch_bytes(const SoftmaxShape& x, int64_t heads) {
  const int64_t fewest = x.max_seqlen > 0 ? (x.tokens + x.max_seqlen - 1) / x.max_seqlen : 1;
  const int64_t batch =
      x.backward ? cudnn_batch(std::min(fewest, kMaxCudnnDocuments)) : kMaxCudnnDocuments;
  return cudnn_statistics_bytes(x.tokens, heads) + cudnn_index_bytes(kMaxCudnnDocuments) +
         cudnn_workspace_bytes(x, heads, batch);
}

AttentionChoice choose(const SoftmaxShape& x, const Target& target, std::string_view forced) {
  AttentionChoice choice{.bytes = portable_scratch_bytes(x)};
  const bool can = why_not_hopper(x, target, forced).empty();
  if (x.far) {
    if (!can || forces(forced, Implementation::kPortable)) return choice;
    choice.implementation = Implementation::kHopper;
    choice.hopper_part = choice.bytes;
    choice.bytes += kernels::tile_scheduler_bytes(x.tokens);
    return choice;
  }
  if (can && (forced.empty() ? fastest_on_hopper(x) : forces(forced, Implementation::kHopper))) {
    choice.implementation = Implementation::kHopper;
    choice.reason = forced.empty() ? "they are faster" : "they are asked for";
    choice.hopper_part = choice.bytes;
    choice.bytes += kernels::tile_scheduler_bytes(x.tokens);
    return choice;
  }
  if (forces(forced, Implementation::kPortable)) {
    choice.reason = "they are asked for";
    return choice;
  }
  const bool must = forces(forced, Implementation::kCudnn);
  choice.reason = why_not_cudnn(x, target, must);
  if (!choice.reason.empty()) {
    if (must) fail(ExitCode::kUsage, "cudnn is asked for, but {}", choice.reason);
    return choice;
  }
  choice.implementation = Implementation::kCudnn;
  choice.heads = x.backward ? cudnn_backward_heads(x) : x.heads;
  choice.bytes = std::max(choice.bytes, cudnn_scratch_bytes(x, choice.heads));
  return choice;
}

AttentionChoice choose(const StickBreakingShape& x, const Target& target, std::string_view forced) {
  AttentionChoice choice = choose_implementation(x, target, forced);
  if (x.backward) {
    plan_backward(x, choice);
  } else if (choice.implementation == Implementation::kHopper) {
    choice.bytes = kernels::stickbreaking_hopper_forward_scratch_bytes(x.tokens);
  }
  return choice;
}

namespace {

template <typename Op>
SoftmaxShape softmax_shape(const Op& op, const Stream& s) {
  SoftmaxShape shape{.bias = op.bias.kind,
                     .tokens = op.q_THd.rows(),
                     .heads = op.params.heads,
                     .head_dim = op.q_THd.cols() / op.params.heads,
                     .max_seqlen = op.q_THd.rows(),
                     .window = op.params.window,
                     .deterministic = s.deterministic(),
                     .group = queries_of_key(op.q_THd, op.k_THd)};
  if constexpr (requires { op.far; }) {
    shape.far = true;
  } else {
    shape.max_seqlen = op.sequences.max_seqlen;
  }
  if constexpr (requires { op.dq_THd; }) {
    shape.backward = true;
    shape.dq_stride = op.dq_THd.row_stride;
  }
  return shape;
}

template <typename Op>
requires requires(const Op& op) {
  op.far;
}
StickBreakingShape stickbreaking_shape(const Op& op) {
  return {.backward = std::is_same_v<Op, StickBreakingFarBackward>,
          .tokens = op.q_THd.rows(),
          .heads = op.params.heads,
          .head_dim = op.q_THd.cols() / op.params.heads,
          .max_seqlen = op.q_THd.rows(),
          .gated = op.gate_TH.defined(),
          .group = queries_of_key(op.q_THd, op.k_THd),
          .far = true};
}
template <typename Op>
StickBreakingShape stickbreaking_shape(const Op& op) {
  return {.backward = std::is_same_v<Op, StickBreakingBackward>,
          .tokens = op.q_THd.rows(),
          .heads = op.params.heads,
          .head_dim = op.q_THd.cols() / op.params.heads,
          .max_seqlen = op.sequences.max_seqlen,
          .gated = op.gate_TH.defined(),
          .learned_remainder = op.params.remainder == Remainder::kBias,
          .group = queries_of_key(op.q_THd, op.k_THd)};
}

// The scratch has the states of all chunks for a group of heads, and in the backward pass
// rowsum(do * o) of every query and head. RebasedState is always chunked.
template <typename Op>
RebasedChoice choose_rebased(const Op& op) {
  const int64_t heads = op.params.heads;
  const int64_t e = op.v_THe.cols() / heads;
  RebasedChoice choice{.chunked = true};
  if constexpr (requires { op.sequences; }) {
    choice.chunked = !op.params.quadratic && op.sequences.max_seqlen > rebased_pairs(e);
  }
  choice.state = rebased_state_rows(op.k_THf.cols() / heads, op.params) * (e + 1);
  const int64_t chunks = kernels::rebased_chunks(op.k_THf.rows());
  choice.heads = heads_at_a_time(heads, chunks * choice.state * 4);
  int64_t floats = choice.chunked ? chunks * choice.heads * choice.state : 0;
  if constexpr (requires { op.do_THe; }) floats += heads * op.q_THf.rows();
  choice.bytes = static_cast<size_t>(floats) * sizeof(float);
  return choice;
}

}  // namespace

template <typename Choice, typename Op>
Planned<Choice> plan(const Stream& s, const Op& op, std::string_view name) {
  if (!on_cuda(s)) return {{}, cpu::scratch(s, op)};
  Planned<Choice> planned;
  if constexpr (std::is_same_v<Choice, RebasedChoice>) {
    planned.choice = choose_rebased(op);
  } else if constexpr (requires { op.bias; }) {
    planned.choice = choose(softmax_shape(op, s), s.target(), s.implementation());
  } else {
    planned.choice = choose(stickbreaking_shape(op), s.target(), s.implementation());
  }
  const auto floats = static_cast<int64_t>(planned.choice.bytes / sizeof(float));
  if (floats > 0) planned.buffer = s.scratch(name, DType::kF32, {floats});
  return planned;
}

template AttentionScratch plan(const Stream& s, const SoftmaxForward& op, std::string_view name);
template AttentionScratch plan(const Stream& s, const SoftmaxBackward& op, std::string_view name);
template AttentionScratch plan(const Stream& s, const StickBreakingForward& op,
                               std::string_view name);
template AttentionScratch plan(const Stream& s, const StickBreakingBackward& op,
                               std::string_view name);
template AttentionScratch plan(const Stream& s, const StickBreakingFarForward& op,
                               std::string_view name);
template AttentionScratch plan(const Stream& s, const StickBreakingFarBackward& op,
                               std::string_view name);
template AttentionScratch plan(const Stream& s, const SoftmaxFarForward& op, std::string_view name);
template AttentionScratch plan(const Stream& s, const SoftmaxFarBackward& op,
                               std::string_view name);
template RebasedScratch plan(const Stream& s, const RebasedForward& op, std::string_view name);
template RebasedScratch plan(const Stream& s, const RebasedBackward& op, std::string_view name);
template RebasedScratch plan(const Stream& s, const RebasedState& op, std::string_view name);

}  // namespace sbtrain::ops
