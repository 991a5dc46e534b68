// Based and ReBased attention: checks its tensors, then runs it on the stream's backend.
#include "ops/check_attention.h"
#include "ops/cpu/attention.h"
#include "ops/cuda/cuda.h"
#include "ops/cuda/scratch.h"
#include "ops/scratch.h"

namespace sbtrain::ops {
namespace {

constexpr DType kF32 = DType::kF32;

// Features and values of a head.
struct Shape {
  int64_t f, e;
};

Shape check_qkv(std::string_view op, const Tensor& q, const Tensor& k, const Tensor& v,
                const RebasedParams& params) {
  const Shape shape = {check_heads(op, "q", q, q.rows(), params.heads),
                       check_heads(op, "v", v, q.rows(), params.heads)};
  check_same_shape(op, "k", k, q);
  return shape;
}

template <typename Tensors>
Shape check(std::string_view op, const Tensors& t, const Sequences& sequences,
            const RebasedParams& params) {
  const Shape shape = check_qkv(op, t.q_THf, t.k_THf, t.v_THe, params);
  check_same_shape(op, "o_THe", t.o_THe, t.v_THe);
  check_matrix(op, "den_HT", t.den_HT, kF32, params.heads, t.q_THf.rows());
  check_documents(op, sequences, t.q_THf.rows());
  return shape;
}

cuda::RebasedWorkspace workspace(const Shape& shape, int64_t tokens, const Sequences& sequences,
                                 const RebasedParams& params) {
  return cuda::rebased_workspace(tokens, shape.f, shape.e, params, sequences.max_seqlen);
}

}  // namespace

int64_t rebased_state_rows(int64_t features, const RebasedParams& params) {
  const bool lower = params.constant != 0.0f || params.linear != 0.0f;
  return features * (features + 1) / 2 + (lower ? 1 + features : 0);
}

void rebased_forward(Stream& s, const RebasedForward& t, const Sequences& sequences,
                     const RebasedParams& params) {
  constexpr std::string_view kOp = "rebased_forward";
  const Shape shape = check(kOp, t, sequences, params);
  dispatch(
      s, kOp, [&] { cpu::rebased_forward(s, t, sequences, params); },
      [&] { cuda::rebased_forward(s, t, sequences, params); },
      [&] {
        if (!on_cuda(s)) return void(cpu::rebased_scratch(s, shape.f, shape.e, params));
        const int64_t tokens = t.q_THf.rows();
        cuda::rebased_forward_scratch(s, tokens, workspace(shape, tokens, sequences, params));
      });
}

void rebased_backward(Stream& s, const RebasedBackward& t, const Sequences& sequences,
                      const RebasedParams& params) {
  constexpr std::string_view kOp = "rebased_backward";
  const Shape shape = check(kOp, t, sequences, params);
  check_same_shape(kOp, "dq_THf", t.dq_THf, t.q_THf);
  check_same_shape(kOp, "dk_THf", t.dk_THf, t.q_THf);
  check_same_shape(kOp, "dv_THe", t.dv_THe, t.v_THe);
  check_same_shape(kOp, "do_THe", t.do_THe, t.v_THe);
  dispatch(
      s, kOp, [&] { cpu::rebased_backward(s, t, sequences, params); },
      [&] { cuda::rebased_backward(s, t, sequences, params); },
      [&] {
        if (!on_cuda(s)) return void(cpu::rebased_scratch(s, shape.f, shape.e, params));
        const int64_t tokens = t.q_THf.rows();
        cuda::rebased_backward_scratch(s, tokens, params.heads,
                                       workspace(shape, tokens, sequences, params));
      });
}

void rebased_state(Stream& s, Tensor state_Re, Tensor k_THf, Tensor v_THe,
                   const RebasedParams& params) {
  constexpr std::string_view kOp = "rebased_state";
  const Shape shape = check_qkv(kOp, k_THf, k_THf, v_THe, params);
  check_flat(kOp, "state_Re", state_Re, kF32,
             params.heads * rebased_state_rows(shape.f, params) * (shape.e + 1));
  dispatch(
      s, kOp, [&] { cpu::rebased_state(s, state_Re, k_THf, v_THe, params); },
      [&] { cuda::rebased_state(s, state_Re, k_THf, v_THe, params); },
      [&] {
        if (!on_cuda(s)) return void(cpu::rebased_scratch(s, shape.f, shape.e, params));
        const int64_t tokens = k_THf.rows();
        cuda::rebased_forward_scratch(
            s, tokens, cuda::rebased_state_workspace(tokens, shape.f, shape.e, params));
      });
}

void rebased_decode(Stream& s, const RebasedDecode& t, const RebasedParams& params) {
  constexpr std::string_view kOp = "rebased_decode";
  const Shape shape = check_qkv(kOp, t.q_BHf, t.k_BHf, t.v_BHe, params);
  const int64_t sequences = t.q_BHf.rows();
  check_same_shape(kOp, "o_BHe", t.o_BHe, t.v_BHe);
  check_flat(kOp, "state_BRe", t.state_BRe, kF32,
             sequences * params.heads * rebased_state_rows(shape.f, params) * (shape.e + 1));
  check_flat(kOp, "positions_B", t.positions_B, DType::kI32, sequences);
  dispatch(
      s, kOp, [&] { cpu::rebased_decode(s, t, params); },
      [&] { cuda::rebased_decode(s, t, params); });
}

}  // namespace sbtrain::ops
