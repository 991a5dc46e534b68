// Attention to the keys of other ranks on the CPU, against the fp64 oracle.
#include <gtest/gtest.h>

#include "unit/attention/far_case.h"

namespace sbtrain::test {
namespace {

FarResults run_on_cpu(const FarAttention& x) {
  CpuStream cpu;
  const FarCase& c = x.config;
  const Owned o = constant({c.tokens, x.width()}, FarAttention::kBefore);
  const Owned dq = constant({c.tokens, x.width()}, FarAttention::kBefore);
  const Owned dk = constant({c.tokens, x.width() / c.group}, FarAttention::kBefore);
  const Owned dv = constant({c.tokens, x.width() / c.group}, FarAttention::kBefore);
  const Owned log2_rem = poisoned({c.heads, c.tokens});
  const Owned stop(DType::kI32, {c.heads, c.tokens});
  const Owned dgate = constant({c.tokens, c.heads}, FarAttention::kBefore);
  const Owned w = x.w;
  ops::run(cpu, ops::StickBreakingFarForward{.o_THd = o,
                                             .log2_rem_HT = log2_rem,
                                             .stop_HT = stop,
                                             .before_HT = x.before,
                                             .q_THd = x.q,
                                             .k_THd = x.k,
                                             .v_THd = x.v,
                                             .gate_TH = x.gates(x.gate),
                                             .far = x.far(),
                                             .params = x.params()});
  ops::run(cpu, ops::StickBreakingFarBackward{.dq_THd = dq,
                                              .dk_THd = dk,
                                              .dv_THd = dv,
                                              .dgate_TH = x.gates(dgate),
                                              .w_HT = w,
                                              .do_THd = x.dout,
                                              .before_HT = x.before,
                                              .log2_rem_HT = log2_rem,
                                              .stop_HT = stop,
                                              .q_THd = x.q,
                                              .k_THd = x.k,
                                              .v_THd = x.v,
                                              .gate_TH = x.gates(x.gate),
                                              .far = x.far(),
                                              .params = x.params()});
  return {to_f64(o),  to_f64(log2_rem), to_f64(dq),   to_f64(dk),
          to_f64(dv), to_f64(w),        to_f64(dgate)};
}

TEST(FarStickBreaking, MatchesTheOracle) {
  for (const FarCase& c : far_cases(24)) {
    SCOPED_TRACE(c.describe());
    const FarAttention x(c);
    x.check(run_on_cpu(x), 1e-5, 1e-5);
  }
}

TEST(FarStickBreaking, WithGatesMatchesTheOracle) {
  for (const FarCase& c : gated_far_cases(24)) {
    SCOPED_TRACE(c.describe());
    const FarAttention x(c);
    x.check(run_on_cpu(x), 1e-5, 1e-5);
  }
}

RemainderResults give_remainder_on_cpu(const RemainderOfAll& x) {
  CpuStream cpu;
  const RemainderCase& c = x.config;
  const Owned o = constant({c.tokens, x.width()}, RemainderOfAll::kBefore);
  const Owned w = poisoned({c.heads, c.tokens});
  const Owned given = constant(x.receiver(), RemainderOfAll::kBefore);
  ops::run(cpu, ops::AddRemainder{.o_THd = o,
                                  .log2_rem_HT = x.log2_rem,
                                  .v_THd = x.v,
                                  .remainder_bias_Hd = x.bias,
                                  .params = x.params()});
  ops::run(cpu, ops::RemainderGradient{.w_HT = w,
                                       .do_THd = x.dout,
                                       .v_THd = x.v,
                                       .remainder_bias_Hd = x.bias,
                                       .params = x.params()});
  ops::run(cpu, ops::AddRemainderBackward{.dv_THd = given,
                                          .dremainder_bias_Hd = given,
                                          .do_THd = x.dout,
                                          .log2_rem_HT = x.log2_rem,
                                          .params = x.params()});
  return {to_f64(o), to_f64(w), to_f64(given)};
}

TEST(FarStickBreaking, GivesTheRemainderAway) {
  for (const RemainderCase& c : remainder_cases(24)) {
    SCOPED_TRACE(c.describe());
    const RemainderOfAll x(c);
    x.check(give_remainder_on_cpu(x), 1e-6);
  }
}

FarSoftmaxResults run_softmax_on_cpu(const FarAttention& x) {
  CpuStream cpu;
  const FarCase& c = x.config;
  const Owned o = x.o, lse = x.lse;
  const Owned dq = constant({c.tokens, x.width()}, FarAttention::kBefore);
  const Owned dk = constant({c.tokens, x.width() / c.group}, FarAttention::kBefore);
  const Owned dv = constant({c.tokens, x.width() / c.group}, FarAttention::kBefore);
  ops::run(cpu, ops::SoftmaxFarForward{.o_THd = o,
                                       .lse_HT = lse,
                                       .q_THd = x.q,
                                       .k_THd = x.k,
                                       .v_THd = x.v,
                                       .bias = x.softmax_bias(),
                                       .far = x.far(),
                                       .distance = c.distance,
                                       .params = x.softmax_params()});
  ops::run(cpu, ops::SoftmaxFarBackward{.dq_THd = dq,
                                        .dk_THd = dk,
                                        .dv_THd = dv,
                                        .do_THd = x.dout,
                                        .o_THd = o,
                                        .lse_HT = lse,
                                        .q_THd = x.q,
                                        .k_THd = x.k,
                                        .v_THd = x.v,
                                        .bias = x.softmax_bias(),
                                        .far = x.far(),
                                        .distance = c.distance,
                                        .params = x.softmax_params()});
  return {to_f64(o), to_f64(lse), to_f64(dq), to_f64(dk), to_f64(dv)};
}

TEST(FarSoftmax, MatchesTheOracle) {
  for (const FarCase& c : far_softmax_cases(24)) {
    SCOPED_TRACE(c.describe());
    const FarAttention x(c);
    x.check(run_softmax_on_cpu(x), 1e-5, 1e-5);
  }
}

}  // namespace
}  // namespace sbtrain::test
