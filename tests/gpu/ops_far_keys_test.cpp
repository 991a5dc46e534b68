// Attention to the keys of other ranks on the GPU, against the fp64 oracle.
#include "gpu/op_test.h"
#include "ops/choose.h"
#include "unit/attention/far_case.h"

namespace sbtrain::test {
namespace {

using OpsFarKeys = GpuOpTest;

FarResults run_on_gpu(GpuStream& gpu, const FarAttention& x) {
  const FarCase& c = x.config;
  const auto sums = [&](int64_t width) {
    return OnGpu(gpu, constant({c.tokens, width}, FarAttention::kBefore), DType::kF32);
  };
  const int64_t key_width = x.width() / c.group;
  const OnGpu q(gpu, x.q, DType::kBF16, 8), k(gpu, x.k, DType::kBF16, 16);
  const OnGpu v(gpu, x.v, DType::kBF16, 16), dout(gpu, x.dout, DType::kBF16, 8);
  const OnGpu o = sums(x.width()), dq = sums(x.width()), dk = sums(key_width), dv = sums(key_width);
  const OnGpu before(gpu, x.before, DType::kF32), w(gpu, x.w, DType::kF32);
  const OnGpu gate(gpu, x.gate, DType::kF32);
  const OnGpu dgate(gpu, constant({c.tokens, c.heads}, FarAttention::kBefore), DType::kF32);
  const OnGpu log2_rem(gpu, DType::kF32, {c.heads, c.tokens});
  const OnGpu stop(gpu, DType::kI32, {c.heads, c.tokens});
  ops::run(gpu, ops::StickBreakingFarForward{.o_THd = o,
                                             .log2_rem_HT = log2_rem,
                                             .stop_HT = stop,
                                             .before_HT = before,
                                             .q_THd = q,
                                             .k_THd = k,
                                             .v_THd = v,
                                             .gate_TH = x.gates(gate),
                                             .far = x.far(),
                                             .params = x.params()});
  ops::run(gpu, ops::StickBreakingFarBackward{.dq_THd = dq,
                                              .dk_THd = dk,
                                              .dv_THd = dv,
                                              .dgate_TH = x.gates(dgate),
                                              .w_HT = w,
                                              .do_THd = dout,
                                              .before_HT = before,
                                              .log2_rem_HT = log2_rem,
                                              .stop_HT = stop,
                                              .q_THd = q,
                                              .k_THd = k,
                                              .v_THd = v,
                                              .gate_TH = x.gates(gate),
                                              .far = x.far(),
                                              .params = x.params()});
  return {o.values(),  log2_rem.values(), dq.values(),   dk.values(),
          dv.values(), w.values(),        dgate.values()};
}

// What `run` computes of a case, beside the oracle, and that it repeats.
template <typename Run>
void check_case(GpuStream& gpu, const FarCase& c, const Run& run) {
  FarAttention x(c);
  for (Owned* t : {&x.q, &x.k, &x.v, &x.dout}) round_to_bf16(*t);
  const auto seen = run(gpu, x);
  x.check(seen, 4e-3, 8e-3);
  const auto again = run(gpu, x);
  EXPECT_EQ(again.o, seen.o);
  EXPECT_EQ(again.dq, seen.dq);
  EXPECT_EQ(again.dk, seen.dk);
  EXPECT_EQ(again.dv, seen.dv);
}

void check_far(GpuStream& gpu, const std::string& implementation, int64_t head_dim) {
  gpu.stream.set_implementation(implementation);
  for (const FarCase& c : far_cases(head_dim)) {
    SCOPED_TRACE(implementation + ", " + c.describe());
    check_case(gpu, c, run_on_gpu);
  }
}

TEST_F(OpsFarKeys, PortableKernelsMatchTheOracle) {
  for (const int64_t head_dim : {24, 32, 64, 128, 200}) check_far(gpu(), "portable", head_dim);
}

TEST_F(OpsFarKeys, PortableKernelsWithGatesMatchTheOracle) {
  for (const int64_t head_dim : {24, 32, 64, 128, 200}) {
    for (const FarCase& c : gated_far_cases(head_dim)) {
      SCOPED_TRACE(c.describe());
      check_case(gpu(), c, run_on_gpu);
    }
  }
}

TEST_F(OpsFarKeys, KernelsForHopperMatchTheOracle) {
  if (!gpu().stream.target().has_wgmma()) GTEST_SKIP() << "needs a GPU with wgmma";
  for (const int64_t head_dim : {32, 64, 128}) check_far(gpu(), "hopper", head_dim);
}

// So many tiles that the backward pass is a single one.
TEST_F(OpsFarKeys, SinglePassMatchesTheOracle) {
  if (!gpu().stream.target().has_wgmma()) GTEST_SKIP() << "needs a GPU with wgmma";
  for (const int64_t head_dim : {32, 64}) {
    for (const float epsilon : {0.0f, 0x1p-24f}) {
      const FarCase c{1536, 1500, 1400, 8, 1, head_dim, epsilon};
      SCOPED_TRACE(c.describe());
      ASSERT_TRUE(ops::choose(ops::StickBreakingShape{.backward = true,
                                                      .tokens = c.tokens,
                                                      .heads = c.heads,
                                                      .head_dim = c.head_dim,
                                                      .far = true},
                              gpu().stream.target())
                      .single_pass);
      check_case(gpu(), c, run_on_gpu);
    }
  }
}

TEST_F(OpsFarKeys, RemaindersAreGivenAway) {
  for (const int64_t head_dim : {24, 32, 64, 128, 200}) {
    for (const RemainderCase& c : remainder_cases(head_dim)) {
      SCOPED_TRACE(c.describe());
      RemainderOfAll x(c);
      for (Owned* t : {&x.v, &x.bias, &x.dout}) round_to_bf16(*t);
      const OnGpu log2_rem(gpu(), x.log2_rem, DType::kF32), v(gpu(), x.v, DType::kBF16, 16);
      const OnGpu bias(gpu(), x.bias, DType::kBF16), dout(gpu(), x.dout, DType::kBF16, 8);
      const OnGpu o(gpu(), constant({c.tokens, x.width()}, RemainderOfAll::kBefore), DType::kF32);
      const OnGpu w(gpu(), DType::kF32, {c.heads, c.tokens});
      const OnGpu given(gpu(), constant(x.receiver(), RemainderOfAll::kBefore), DType::kF32);
      ops::run(gpu(), ops::AddRemainder{.o_THd = o,
                                        .log2_rem_HT = log2_rem,
                                        .v_THd = v,
                                        .remainder_bias_Hd = bias,
                                        .params = x.params()});
      ops::run(gpu(), ops::RemainderGradient{.w_HT = w,
                                             .do_THd = dout,
                                             .v_THd = v,
                                             .remainder_bias_Hd = bias,
                                             .params = x.params()});
      ops::run(gpu(), ops::AddRemainderBackward{.dv_THd = given,
                                                .dremainder_bias_Hd = given,
                                                .do_THd = dout,
                                                .log2_rem_HT = log2_rem,
                                                .params = x.params()});
      x.check({o.values(), w.values(), given.values()}, 1e-5);
    }
  }
}

FarSoftmaxResults run_softmax_on_gpu(GpuStream& gpu, const FarAttention& x) {
  const FarCase& c = x.config;
  const auto sums = [&](int64_t width) {
    return OnGpu(gpu, constant({c.tokens, width}, FarAttention::kBefore), DType::kF32);
  };
  const int64_t key_width = x.width() / c.group;
  const OnGpu q(gpu, x.q, DType::kBF16, 8), k(gpu, x.k, DType::kBF16, 16);
  const OnGpu v(gpu, x.v, DType::kBF16, 16), dout(gpu, x.dout, DType::kBF16, 8);
  const OnGpu o(gpu, x.o, DType::kF32), lse(gpu, x.lse, DType::kF32);
  const OnGpu rounded(gpu, DType::kBF16, {c.tokens, x.width()}, 8);
  const OnGpu dq = sums(x.width()), dk = sums(key_width), dv = sums(key_width);
  ops::run(gpu, ops::SoftmaxFarForward{.o_THd = o,
                                       .lse_HT = lse,
                                       .q_THd = q,
                                       .k_THd = k,
                                       .v_THd = v,
                                       .bias = x.softmax_bias(),
                                       .far = x.far(),
                                       .distance = c.distance,
                                       .params = x.softmax_params()});
  ops::run(gpu, ops::Copy{.y = rounded, .x = o});
  ops::run(gpu, ops::SoftmaxFarBackward{.dq_THd = dq,
                                        .dk_THd = dk,
                                        .dv_THd = dv,
                                        .do_THd = dout,
                                        .o_THd = rounded,
                                        .lse_HT = lse,
                                        .q_THd = q,
                                        .k_THd = k,
                                        .v_THd = v,
                                        .bias = x.softmax_bias(),
                                        .far = x.far(),
                                        .distance = c.distance,
                                        .params = x.softmax_params()});
  return {o.values(), lse.values(), dq.values(), dk.values(), dv.values()};
}

void check_far_softmax(GpuStream& gpu, const std::string& implementation, int64_t head_dim) {
  gpu.stream.set_implementation(implementation);
  for (const FarCase& c : far_softmax_cases(head_dim)) {
    // There is no such gradient for Hopper.
    if (implementation == "hopper" && c.alibi && c.group > 1) continue;
    SCOPED_TRACE(implementation + ", " + c.describe());
    check_case(gpu, c, run_softmax_on_gpu);
  }
}

TEST_F(OpsFarKeys, PortableSoftmaxMatchesTheOracle) {
  for (const int64_t head_dim : {24, 32, 64, 128, 200}) {
    check_far_softmax(gpu(), "portable", head_dim);
  }
}

TEST_F(OpsFarKeys, SoftmaxForHopperMatchesTheOracle) {
  if (!gpu().stream.target().has_wgmma()) GTEST_SKIP() << "needs a GPU with wgmma";
  for (const int64_t head_dim : {32, 64, 128}) check_far_softmax(gpu(), "hopper", head_dim);
}

}  // namespace
}  // namespace sbtrain::test
