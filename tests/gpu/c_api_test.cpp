// The C interface of the attention kernels gives the bits that the program's ops give:
// stick-breaking attention, forward and backward, of a ragged pack, with heads of their own and
// with shared ones.
#include <numeric>

#include "gpu/op_test.h"
#include "ops/attention.h"
#include "sbtrain/attention.h"

namespace sbtrain::test {
namespace {

struct CInterface : GpuOpTest {
  const std::vector<int32_t> documents{700, 1, 127, 300, 64};
  static constexpr int kHeads = 4;
  static constexpr float kScale = 0.17f;
  int64_t tokens() const { return std::accumulate(documents.begin(), documents.end(), int64_t{0}); }
};

sbtrain_rows rows(const OnGpu& x) {
  return {x.tensor().data, x.tensor().row_stride};
}

// The tensors of one run.
struct Pass {
  Pass(GpuStream& gpu, int64_t tokens, int64_t width, int64_t groups_width)
      : o(gpu, DType::kBF16, {tokens, width}),
        log2_rem(gpu, DType::kF32, {CInterface::kHeads, tokens}),
        stop(gpu, DType::kI32, {CInterface::kHeads, tokens}),
        dq(gpu, DType::kBF16, {tokens, width}),
        dk(gpu, DType::kBF16, {tokens, groups_width}),
        dv(gpu, DType::kBF16, {tokens, groups_width}) {}
  std::vector<const OnGpu*> all() const { return {&o, &log2_rem, &stop, &dq, &dk, &dv}; }
  OnGpu o, log2_rem, stop, dq, dk, dv;
};

struct Inputs {
  Inputs(GpuStream& gpu, int64_t tokens, int64_t width, int64_t groups_width)
      : q(gpu, random_bf16("q", {tokens, width}), DType::kBF16, 8),
        k(gpu, random_bf16("k", {tokens, groups_width}), DType::kBF16),
        v(gpu, random_bf16("v", {tokens, groups_width}), DType::kBF16),
        dout(gpu, random_bf16("do", {tokens, width}), DType::kBF16) {}
  OnGpu q, k, v, dout;
};

void run_program(GpuStream& gpu, const Inputs& in, Pass& out, const Sequences& sequences) {
  const ops::StickBreakingParams params{
      .heads = CInterface::kHeads, .scale = CInterface::kScale, .skip_epsilon = 0x1p-24f};
  ops::run(gpu, ops::StickBreakingForward{.o_THd = out.o,
                                          .log2_rem_HT = out.log2_rem,
                                          .stop_HT = out.stop,
                                          .q_THd = in.q,
                                          .k_THd = in.k,
                                          .v_THd = in.v,
                                          .sequences = sequences,
                                          .params = params});
  ops::run(gpu, ops::StickBreakingBackward{.dq_THd = out.dq,
                                           .dk_THd = out.dk,
                                           .dv_THd = out.dv,
                                           .do_THd = in.dout,
                                           .log2_rem_HT = out.log2_rem,
                                           .stop_HT = out.stop,
                                           .q_THd = in.q,
                                           .k_THd = in.k,
                                           .v_THd = in.v,
                                           .sequences = sequences,
                                           .params = params});
}

void run_c(GpuStream& gpu, const Inputs& in, Pass& out, const Sequences& sequences, int groups) {
  sbtrain_stickbreaking x = SBTRAIN_INIT(sbtrain_stickbreaking);
  x.stream = ops::cuda::cuda_stream(gpu);
  x.heads = CInterface::kHeads, x.kv_heads = groups;
  x.head_dim = static_cast<int>(in.q.tensor().cols()) / x.heads;
  x.tokens = in.q.tensor().rows(), x.sequences = sequences.count;
  x.max_seqlen = sequences.max_seqlen, x.cu_seqlens = sequences.cu_seqlens.i32();
  x.scale = CInterface::kScale, x.skip_epsilon = 0x1p-24f;
  x.q = rows(in.q), x.k = rows(in.k), x.v = rows(in.v), x.o = rows(out.o);
  x.log2_remainder = out.log2_rem.tensor().f32(), x.stop = out.stop.tensor().i32();
  x.d_o = rows(in.dout), x.dq = rows(out.dq), x.dk = rows(out.dk), x.dv = rows(out.dv);
  for (const int backward : {0, 1}) {
    ASSERT_EQ(sbtrain_stickbreaking_workspace(&x, backward, &x.workspace_bytes), SBTRAIN_OK)
        << sbtrain_last_error();
    const OnGpu workspace(gpu, DType::kU8, {static_cast<int64_t>(x.workspace_bytes)});
    x.workspace = workspace.tensor().data;
    ASSERT_EQ(backward ? sbtrain_stickbreaking_backward(&x) : sbtrain_stickbreaking_forward(&x),
              SBTRAIN_OK)
        << sbtrain_last_error();
    ops::run(gpu, ops::Synchronize{});
  }
}

TEST_F(CInterface, GivesTheBitsOfTheProgram) {
  std::vector<int32_t> bounds{0}, positions;
  for (const int32_t length : documents) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    bounds.push_back(bounds.back() + length);
  }
  const OnGpu cu(gpu(), integers(bounds), DType::kI32);
  const OnGpu at(gpu(), integers(positions), DType::kI32);
  const Sequences sequences{.cu_seqlens = cu,
                            .positions_T = at,
                            .count = static_cast<int64_t>(documents.size()),
                            .max_seqlen = 700};
  for (const int d : {32, 64, 72, 128}) {
    SCOPED_TRACE(d);
    const int64_t width = kHeads * d;
    const Inputs in(gpu(), tokens(), width, width);
    Pass program(gpu(), tokens(), width, width), ours(gpu(), tokens(), width, width);
    run_program(gpu(), in, program, sequences);
    run_c(gpu(), in, ours, sequences, 0);
    for (size_t i = 0; i < ours.all().size(); ++i) {
      EXPECT_EQ(ours.all()[i]->raw(), program.all()[i]->raw()) << "tensor " << i;
    }
  }
}

TEST_F(CInterface, GivesTheBitsOfTheProgramForSharedHeads) {
  const OnGpu cu(gpu(), integers({0, static_cast<int32_t>(tokens())}), DType::kI32);
  std::vector<int32_t> positions(static_cast<size_t>(tokens()));
  std::iota(positions.begin(), positions.end(), 0);
  const OnGpu at(gpu(), integers(positions), DType::kI32);
  const Sequences sequences{
      .cu_seqlens = cu, .positions_T = at, .count = 1, .max_seqlen = tokens()};
  for (const int d : {64, 72}) {
    SCOPED_TRACE(d);
    constexpr int kGroups = 2;
    const int64_t width = kHeads * d, few = kGroups * d;
    const Inputs in(gpu(), tokens(), width, few);
    Pass program(gpu(), tokens(), width, few), ours(gpu(), tokens(), width, few);
    run_program(gpu(), in, program, sequences);
    run_c(gpu(), in, ours, sequences, kGroups);
    for (size_t i = 0; i < ours.all().size(); ++i) {
      EXPECT_EQ(ours.all()[i]->raw(), program.all()[i]->raw()) << "tensor " << i;
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
