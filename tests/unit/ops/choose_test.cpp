// A plan knows before anything runs which implementation is chosen and what a backend does not
// support. These tests need no GPU.
#include "ops/choose.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/log.h"
#include "ops/coca.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"
#include "ops/run.h"

namespace sbtrain::ops {
namespace {

// Ops that only one backend has.
struct OnCpuAlone {
  static constexpr std::string_view kName = "abacus";
  void check() const {}
};
struct OnCudaAlone {
  static constexpr std::string_view kName = "warp";
  void check() const {}
};

}  // namespace

namespace cpu {
static int runs = 0;
static void run(Cpu, Stream& /*s*/, const OnCpuAlone& /*op*/) {
  ++runs;
}
}  // namespace cpu
namespace cuda {
[[maybe_unused]] static void run(Cuda, Stream& /*s*/, const OnCudaAlone& /*op*/) {}
}  // namespace cuda

namespace {

// The error of planning `op` for the target; empty if there is none.
template <typename Op>
std::string planning_error(const Op& op, const Target& target = Backend::kCuda) {
  Memory memory = Memory::planning(target);
  Stream s(memory);
  try {
    run(s, op);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig) << error.what();
    return error.what();
  }
  return "";
}

TEST(Backends, AnOpThatOneLacksIsRefusedByThePlan) {
  EXPECT_EQ(planning_error(OnCpuAlone{}), "abacus: not on CUDA yet; set device: cpu");
  EXPECT_EQ(planning_error(OnCudaAlone{}, Backend::kCpu),
            "warp: not on the CPU yet; set device: cuda");
  EXPECT_EQ(planning_error(OnCpuAlone{}, Backend::kCpu), "");
  EXPECT_EQ(planning_error(OnCudaAlone{}), "");
  EXPECT_EQ(cpu::runs, 0);
  Memory memory(Backend::kCpu);
  Stream s(memory);
  run(s, OnCpuAlone{});
  EXPECT_EQ(cpu::runs, 1);
}

// A view without data, as in plans.
Tensor view(std::initializer_list<int64_t> shape, DType dtype = DType::kBF16) {
  return {nullptr, dtype, shape};
}

constexpr int64_t kTokens = 256;

Sequences sequences(int64_t max_seqlen = kTokens) {
  return {.cu_seqlens = view({9}, DType::kI32),
          .positions_T = view({kTokens}, DType::kI32),
          .count = 8,
          .max_seqlen = max_seqlen};
}

SoftmaxForward softmax(int heads, int64_t head_dim, PositionBias bias = PositionBias::kNone) {
  const Tensor x = view({kTokens, heads * head_dim});
  return {.o_THd = x,
          .lse_HT = view({heads, kTokens}, DType::kF32),
          .q_THd = x,
          .k_THd = x,
          .v_THd = x,
          .bias = {.kind = bias},
          .sequences = sequences(),
          .params = {.heads = heads}};
}

StickBreakingForward stickbreaking(int heads, int64_t head_dim) {
  const Tensor x = view({kTokens, heads * head_dim});
  return {.o_THd = x,
          .log2_rem_HT = view({heads, kTokens}, DType::kF32),
          .stop_HT = view({heads, kTokens}, DType::kI32),
          .q_THd = x,
          .k_THd = x,
          .v_THd = x,
          .sequences = sequences(),
          .params = {.heads = heads}};
}

RebasedForward rebased(int64_t features, int64_t values) {
  return {.o_THe = view({kTokens, 2 * values}),
          .den_HT = view({2, kTokens}, DType::kF32),
          .q_THf = view({kTokens, 2 * features}),
          .k_THf = view({kTokens, 2 * features}),
          .v_THe = view({kTokens, 2 * values}),
          .sequences = sequences(),
          .params = {.heads = 2}};
}

RmsNorm rmsnorm(int64_t width) {
  return {.y_TD = view({kTokens, width}),
          .x_TD = view({kTokens, width}),
          .w_D = view({width}),
          .eps = 1e-5f};
}

HeadNorm head_norm(int64_t head_dim) {
  return {.y_THd = view({kTokens, 2 * head_dim}),
          .x_THd = view({kTokens, 2 * head_dim}),
          .w_Hd = view({2 * head_dim}),
          .b_Hd = view({2 * head_dim}),
          .heads = 2,
          .eps = 1e-5f};
}

Rope rope(int64_t head_dim) {
  return {.x_THd = view({kTokens, 2 * head_dim}),
          .positions_T = view({kTokens}, DType::kI32),
          .params = {.heads = 2, .frequencies = rope_frequencies(10000, head_dim)}};
}

CocaQuery coca(int64_t head_dim) {
  return {.y_THd = view({kTokens, 2 * head_dim}),
          .q_THd = view({kTokens, 2 * head_dim}),
          .positions_T = view({kTokens}, DType::kI32),
          .params = {.rope = {.heads = 2, .frequencies = rope_frequencies(10000, head_dim)}}};
}

SoftmaxDecode decode(int heads, int64_t head_dim, PositionBias bias = PositionBias::kNone) {
  const Tensor x = view({3, heads * head_dim});
  const Tensor cache = view({3, 7, heads * head_dim});
  return {.o_BHd = x,
          .q_BHd = x,
          .k_cache_BCGd = cache,
          .v_cache_BCGd = cache,
          .lengths_B = view({3}, DType::kI32),
          .bias = {.kind = bias},
          .params = {.heads = heads}};
}

// Checks an op that fits, one that is a step too large, and the setting that the message names.
template <typename Op>
void expect_limit(const Op& fits, const Op& too_large, std::string_view setting) {
  EXPECT_EQ(planning_error(fits), "");
  const std::string error = planning_error(too_large);
  EXPECT_NE(error.find(Op::kName), std::string::npos) << error;
  EXPECT_NE(error.find(setting), std::string::npos) << error;
  EXPECT_EQ(planning_error(too_large, Backend::kCpu), "") << "the CPU has no such limit";
}

HeadRmsNorm head_rmsnorm(int heads, int64_t head_dim) {
  return {.y_THd = view({kTokens, heads * head_dim}),
          .x_THd = view({kTokens, heads * head_dim}),
          .w_d = view({head_dim}),
          .heads = heads,
          .eps = 1e-5f};
}

// A part of each head is rotated.
Rope rope_of_part(int64_t head_dim, int64_t rotated) {
  Rope op = rope(head_dim);
  op.params.frequencies = rope_frequencies(10000, rotated);
  op.params.rotated = rotated;
  return op;
}

TEST(Limits, AreKnownToThePlanAndNameTheSetting) {
  expect_limit(rmsnorm(16384), rmsnorm(16385), "model.width");
  expect_limit(head_norm(512), head_norm(520), "model.heads");
  expect_limit(head_norm(255), head_norm(257), "model.heads");  // not a multiple of 8
  expect_limit(rope(256), rope(258), "model.heads");
  expect_limit(rope_of_part(1024, 256), rope_of_part(1024, 258), "model.heads");
  expect_limit(head_rmsnorm(2, 512), head_rmsnorm(2, 520), "model.heads");
  expect_limit(head_rmsnorm(1, 16384), head_rmsnorm(1, 16385), "heads");
  expect_limit(coca(256), coca(258), "model.heads");
  expect_limit(softmax(2, 256), softmax(2, 264), "model.heads");
  expect_limit(softmax(2, 64), softmax(2, 60), "multiple of 8");
  expect_limit(stickbreaking(2, 256), stickbreaking(2, 264), "model.heads");
  expect_limit(softmax(256, 8, PositionBias::kAlibi), softmax(257, 8, PositionBias::kAlibi),
               "model.heads");
  expect_limit(decode(2, 256), decode(2, 257), "model.heads");
  expect_limit(decode(256, 8, PositionBias::kAlibi), decode(257, 8, PositionBias::kAlibi),
               "model.heads");
  expect_limit(rebased(32, 128), rebased(33, 128), "model.attention.feature_dim");
  expect_limit(rebased(32, 128), rebased(32, 129), "model.heads");
}

// GPUs with little shared memory take the heads of others up to 128 channels.
TEST(Limits, OfHeadsDependOnTheSharedMemory) {
  for (const int sm : {80, 86, 89, 90, 100, 120}) {
    Target target = Backend::kCuda;
    target.sm = sm;
    const bool little = sm == 86 || sm == 89 || sm == 120;
    EXPECT_NO_THROW(check_attention_heads("op", Tensor(nullptr, DType::kBF16, {1, 128}), 1, target))
        << sm;
    if (little) {
      EXPECT_THROW(check_attention_heads("op", Tensor(nullptr, DType::kBF16, {1, 136}), 1, target),
                   Error)
          << sm;
    } else {
      EXPECT_NO_THROW(
          check_attention_heads("op", Tensor(nullptr, DType::kBF16, {1, 256}), 1, target))
          << sm;
    }
  }
}

// ---- Choice -------------------------------------------------------------------------------------

static_assert(cudnn_batch(0) == 1 && cudnn_batch(8) == 8 && cudnn_batch(9) == 10 &&
              cudnn_batch(4096) == 4096);

SoftmaxShape shape(int64_t head_dim, int64_t max_seqlen, int64_t window = 0) {
  return {.backward = true,
          .tokens = 32768,
          .heads = 16,
          .head_dim = head_dim,
          .max_seqlen = max_seqlen,
          .window = window,
          .dq_stride = 3 * 16 * head_dim,
          .deterministic = true};
}

// A GPU for which no kernels of its own compete with cuDNN.
Target ampere() {
  Target target(Backend::kCuda);
  target.sm = 80;
  return target;
}

TEST(Choose, CudnnWhereItIsFasterAndCan) {
  const Target target = ampere();
  const auto chosen = [&](const SoftmaxShape& x) { return choose(x, target).implementation; };
  EXPECT_EQ(chosen(shape(64, 2048)), Implementation::kCudnn);
  EXPECT_EQ(chosen(shape(128, 2048)), Implementation::kCudnn);
  EXPECT_EQ(chosen(shape(136, 2048)), Implementation::kPortable);
  EXPECT_EQ(chosen(shape(32, 2048)), Implementation::kPortable);
  EXPECT_EQ(chosen(shape(64, 2048, 1024)), Implementation::kPortable);
  EXPECT_EQ(chosen(shape(64, 2048, 1025)), Implementation::kCudnn);
  EXPECT_EQ(chosen(shape(128, 2048, 512)), Implementation::kPortable);
  SoftmaxShape biased = shape(64, 2048);
  biased.bias = PositionBias::kAlibi;
  EXPECT_EQ(choose(biased, target).reason, "cuDNN has no such bias");
  SoftmaxShape forward = shape(32, 2048, 16);
  forward.backward = false;
  EXPECT_EQ(chosen(forward), Implementation::kCudnn);
  Target without = target;
  without.cudnn = 0;
  EXPECT_EQ(choose(shape(64, 2048), without).reason, "the target has no cuDNN");
  EXPECT_LT(choose(shape(64, 2048), without).bytes, choose(shape(64, 2048), target).bytes);
}

// If the scores of long documents exceed the budget, cuDNN takes fewer heads at a time, or none.
TEST(Choose, HeadsOfCudnnFitTheBudget) {
  const Target target = ampere();
  EXPECT_EQ(choose(shape(64, 2048), target).heads, 16);
  const AttentionChoice some = choose(shape(64, 32768), target);
  EXPECT_EQ(some.implementation, Implementation::kCudnn);
  EXPECT_LT(some.heads, 16);
  EXPECT_LE(some.bytes, kMaxCudnnScratch);
  SoftmaxShape long_documents = shape(64, 131072);
  long_documents.tokens = 131072;
  const AttentionChoice none = choose(long_documents, target);
  EXPECT_EQ(none.implementation, Implementation::kPortable);
  EXPECT_EQ(none.reason, "cuDNN wants too much scratch for one head");
}

TEST(Choose, AnImplementationCanBeForced) {
  const Target target(Backend::kCuda);
  const AttentionChoice portable = choose(shape(64, 2048), target, "portable");
  EXPECT_EQ(portable.implementation, Implementation::kPortable);
  EXPECT_EQ(portable.bytes, 2097152u);  // a float for each of 32768 rows of 16 heads
  EXPECT_EQ(choose(shape(32, 2048), target, "cudnn").implementation, Implementation::kCudnn);
  const auto error_of = [&](const SoftmaxShape& x, std::string_view forced) {
    try {
      choose(x, target, forced);
      return std::string("none");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return std::string(error.what());
    }
  };
  EXPECT_EQ(error_of(shape(64, 2048), "magic"),
            "'magic' is no implementation; there are portable, cudnn and hopper");
  SoftmaxShape biased = shape(64, 2048);
  biased.bias = PositionBias::kFire;
  EXPECT_EQ(error_of(biased, "cudnn"), "cudnn is asked for, but cuDNN has no such bias");
}

TEST(Choose, SoftmaxOnHopperWhereItIsFaster) {
  const auto takes_hopper = [&](const SoftmaxShape& x) {
    EXPECT_NE(choose(x, ampere()).implementation, Implementation::kHopper);
    return choose(x, Target(Backend::kCuda)).implementation == Implementation::kHopper;
  };
  SoftmaxShape backward = shape(64, 4096);
  EXPECT_TRUE(takes_hopper(backward));
  EXPECT_TRUE(takes_hopper(shape(128, 4096)));
  EXPECT_TRUE(takes_hopper(shape(64, 4096, 512)));
  EXPECT_FALSE(takes_hopper(shape(32, 2048)));
  EXPECT_FALSE(takes_hopper(shape(96, 4096)));
  backward.deterministic = false;  // then cuDNN sums in any order
  EXPECT_FALSE(takes_hopper(backward));

  SoftmaxShape forward = shape(64, 8192);
  forward.backward = false;
  EXPECT_TRUE(takes_hopper(forward));
  forward.max_seqlen = 16384;
  EXPECT_FALSE(takes_hopper(forward));
  forward = shape(64, 8192, 512);
  forward.backward = false;
  EXPECT_FALSE(takes_hopper(forward));

  for (const bool is_backward : {false, true}) {
    SoftmaxShape biased = shape(128, 512);
    biased.backward = is_backward;
    for (const PositionBias bias : {PositionBias::kAlibi, PositionBias::kFire}) {
      biased.bias = bias;
      EXPECT_TRUE(takes_hopper(biased));
    }
    biased.head_dim = 32;
    EXPECT_FALSE(takes_hopper(biased));
  }
}

TEST(Choose, SoftmaxOnHopperWhereItIsAskedFor) {
  const Target hopper(Backend::kCuda);
  for (const PositionBias bias : {PositionBias::kNone, PositionBias::kAlibi, PositionBias::kFire}) {
    for (const bool backward : {false, true}) {
      for (const int64_t d : {32, 64, 128}) {
        SoftmaxShape x = shape(d, 2048, 512);
        x.bias = bias;
        x.backward = backward;
        const AttentionChoice forced = choose(x, hopper, "hopper");
        EXPECT_EQ(forced.implementation, Implementation::kHopper);
        // The queue of tiles, 513 numbers of 4 bytes, lies behind the scratch of the portable
        // kernels.
        EXPECT_EQ(forced.hopper_part, choose(x, hopper, "portable").bytes);
        EXPECT_EQ(forced.bytes - forced.hopper_part, 2304u);
        EXPECT_THROW(choose(x, ampere(), "hopper"), Error);
      }
    }
  }
  EXPECT_THROW(choose(shape(96, 2048), hopper, "hopper"), Error);
  SoftmaxShape small = shape(64, 100);
  small.tokens = 127;
  EXPECT_THROW(choose(small, hopper, "hopper"), Error);
}

StickBreakingShape stick_shape(int64_t head_dim, int64_t tokens) {
  return {.tokens = tokens, .heads = 24, .head_dim = head_dim, .max_seqlen = 4096};
}

TEST(Choose, StickBreakingOnHopperWhereItsKernelsCan) {
  const Target hopper(Backend::kCuda);
  for (const int64_t d : {32, 64, 128}) {
    EXPECT_EQ(choose(stick_shape(d, 128), hopper).implementation, Implementation::kHopper);
    EXPECT_EQ(choose(stick_shape(d, 128), ampere()).implementation, Implementation::kPortable);
  }
  EXPECT_EQ(choose(stick_shape(64, 127), hopper).reason, "they take packs of at least 128 tokens");
  EXPECT_EQ(choose(stick_shape(96, 4096), hopper).reason,
            "they take heads of 32, 64 or 128 channels");
  StickBreakingShape gated = stick_shape(64, 4096);
  gated.gated = true;
  EXPECT_EQ(choose(gated, hopper).implementation, Implementation::kHopper);
  gated.backward = true;
  EXPECT_EQ(choose(gated, hopper).implementation, Implementation::kHopper);
  gated.group = 4;
  EXPECT_EQ(choose(gated, hopper).implementation, Implementation::kHopper);
  EXPECT_EQ(choose(stick_shape(64, 4096), hopper, "portable").implementation,
            Implementation::kPortable);
  EXPECT_THROW(choose(stick_shape(64, 4096), hopper, "cudnn"), Error);
}

class Lines : public LogSink {
 public:
  void write(const LogLine& line) override { text.emplace_back(line.text); }
  std::vector<std::string> text;
};

// What the kernels for Hopper would take goes to those that every GPU has, and the log says it
// once.
TEST(Choose, PortableKernelsAfterHopper) {
  const auto lines = std::make_shared<Lines>();
  set_log_sink(lines);
  for (const int sm : {100, 120}) {
    Target target(Backend::kCuda);
    target.sm = sm;
    for (int time = 0; time < 2; ++time) {
      EXPECT_EQ(choose(stick_shape(64, 4096), target).implementation, Implementation::kPortable);
      EXPECT_EQ(choose(shape(64, 4096), target).implementation, Implementation::kCudnn);
      SoftmaxShape biased = shape(64, 4096);
      biased.bias = PositionBias::kAlibi;
      EXPECT_EQ(choose(biased, target).implementation, Implementation::kPortable);
      EXPECT_THROW(choose(stick_shape(64, 4096), target, "hopper"), Error);
    }
  }
  choose(stick_shape(64, 4096), ampere());  // what is expected there
  set_log_sink(nullptr);
  ASSERT_EQ(lines->text.size(), 2);
  EXPECT_NE(lines->text[0].find("compute capability 10.0"), std::string::npos) << lines->text[0];
  EXPECT_NE(lines->text[1].find("compute capability 12.0"), std::string::npos) << lines->text[1];
}

// The numbers of bytes are written out, so that a change of what the kernels are given shows here.
TEST(Choose, TheScratchOfStickBreakingHoldsStatesAndQueue) {
  const Target target(Backend::kCuda);
  StickBreakingShape shape = stick_shape(64, 32768);
  EXPECT_EQ(choose(shape, target, "portable").bytes, 0u);
  EXPECT_EQ(choose(shape, target).bytes, 2304u);  // 513 numbers of 4 bytes, in units of 256
  shape.backward = true;
  // All 24 heads at a time, with two floats for each of 32768 rows and 67 blocks of keys.
  const AttentionChoice portable = choose(shape, target, "portable");
  EXPECT_EQ(portable.heads, 24);
  EXPECT_EQ(portable.blocks, 67);
  EXPECT_EQ(portable.bytes, 421527552u);
  // In a single pass two floats for each row of all heads, its first key, 64 sums of dq and, for 64
  // rows, two counters.
  const AttentionChoice single_pass = choose(shape, target);
  EXPECT_TRUE(single_pass.single_pass);
  EXPECT_EQ(single_pass.heads, 24);
  EXPECT_EQ(single_pass.bytes, 210862336u);
  // In two phases four times as many states for half of the heads, a float for each row of these,
  // and the queue.
  shape.head_dim = 128;
  const AttentionChoice two_phases = choose(shape, target);
  EXPECT_FALSE(two_phases.single_pass);
  EXPECT_EQ(two_phases.heads, 12);
  EXPECT_EQ(two_phases.bytes, 844630272u);
  // With gates, 8 bytes more for each key of these heads.
  StickBreakingShape gated = shape;
  gated.gated = true;
  EXPECT_EQ(choose(gated, target).heads, 12);
  EXPECT_EQ(choose(gated, target).bytes, two_phases.bytes + 3145728u);
  shape.head_dim = gated.head_dim = 64;
  EXPECT_TRUE(choose(gated, target).single_pass);
  EXPECT_EQ(choose(gated, target).heads, 24);
  EXPECT_EQ(choose(gated, target).bytes, single_pass.bytes + 6291456u);
  // The states of few tokens are fewer bytes than the sums for the remainder's vector, 264 times 24
  // heads of 64 floats.
  shape.tokens = 1;
  shape.learned_remainder = true;
  EXPECT_EQ(choose(shape, target).bytes, 1622016u);
}

// Heads of up to 64 channels with keys of their own have a single pass over far keys too, with
// scratch for each row; others two phases, with states of each row and 64 keys: of 16 heads of
// 16384 queries and keys, or of 4 of twice as many.
TEST(Choose, StickBreakingOfFarKeys) {
  const Target target(Backend::kCuda);
  StickBreakingShape shape = stick_shape(64, 16384);
  shape.backward = shape.far = true;
  shape.heads = 16;
  EXPECT_TRUE(choose(shape, target).single_pass);
  EXPECT_EQ(choose(shape, target).heads, 16);
  EXPECT_LT(choose(shape, target).bytes, 128u << 20);
  EXPECT_FALSE(choose(shape, target, "portable").single_pass);
  shape.group = 4;
  EXPECT_FALSE(choose(shape, target).single_pass);
  EXPECT_EQ(choose(shape, target).heads, 16);
  EXPECT_EQ(choose(shape, target).tokens, 16384);
  shape.group = 1;
  shape.head_dim = 128;
  EXPECT_FALSE(choose(shape, target).single_pass);
  EXPECT_EQ(choose(shape, target).heads, 16);
  shape.tokens = shape.max_seqlen = 32768;
  EXPECT_EQ(choose(shape, target).heads, 4);
  // With gates the portable kernels have them.
  shape.gated = true;
  EXPECT_EQ(choose(shape, target).implementation, Implementation::kPortable);
  EXPECT_THROW((void)choose(shape, target, "hopper"), Error);
  shape.far = false;
  EXPECT_EQ(choose(shape, target).implementation, Implementation::kHopper);
}

// The states of all heads that share keys and values, or else of a part of them and the sums of dk
// and dv.
TEST(Choose, TheScratchOfStickBreakingHoldsWholeGroups) {
  const Target target(Backend::kCuda);
  StickBreakingShape shape = stick_shape(64, 32768);
  shape.backward = true;
  shape.group = 8;
  EXPECT_EQ(choose(shape, target, "portable").heads, 24);
  EXPECT_EQ(choose(shape, target, "portable").key_sums, 0u);
  EXPECT_EQ(choose(shape, target).heads, 8);
  EXPECT_EQ(choose(shape, target).tokens, 32768);
  // With gates a single pass keeps two floats for each key of all heads, and dk and dv, for whole
  // blocks of 192 keys.
  StickBreakingShape gated = shape;
  gated.gated = true;
  EXPECT_TRUE(choose(gated, target).single_pass);
  EXPECT_EQ(choose(gated, target).heads, 24);
  EXPECT_EQ(choose(gated, target).bytes, 210862336u + 6291456u + 24u * 32832 * 64 * 8);
  // Two phases keep two floats for each key of 8 heads, and for each key of one, in whole segments
  // of 384, 128 channels of dk and dv and 8 floats of dgate.
  gated.head_dim = 128;
  StickBreakingShape wide = shape;
  wide.head_dim = 128;
  EXPECT_FALSE(choose(gated, target).single_pass);
  EXPECT_EQ(choose(gated, target).heads, 8);
  EXPECT_EQ(choose(gated, target).bytes,
            choose(wide, target).bytes + 8u * 32768 * 8 + 33024u * (2 * 128 + 8) * 4);
  // Sums of dk and dv of a group that do not fit 1 GiB leave it to segments.
  gated.head_dim = 64;
  gated.tokens = gated.max_seqlen = 262144;
  EXPECT_FALSE(choose(gated, target).single_pass);
  EXPECT_EQ(choose(gated, target).heads, 1);
  shape.max_seqlen = 32768;  // three heads fit the budget of the portable kernels, one Hopper's
  const AttentionChoice portable = choose(shape, target, "portable");
  EXPECT_EQ(portable.heads, 3);
  EXPECT_EQ(portable.bytes - portable.key_sums, 2u * 32768 * 64 * 4);
  const AttentionChoice hopper = choose(shape, target);
  EXPECT_EQ(hopper.heads, 1);
  EXPECT_GE(hopper.tokens, 32768);
  EXPECT_LE(hopper.bytes, size_t{1} << 30);
}

// Each of few tiles of 64 rows has a multiprocessor of its own, of which there are 132.
TEST(Choose, StickBreakingOfFewTilesHasTwoPhases) {
  const Target target(Backend::kCuda);
  StickBreakingShape shape = stick_shape(64, 320);
  shape.backward = true;
  EXPECT_FALSE(choose(shape, target).single_pass);
  shape.tokens = 321;
  EXPECT_TRUE(choose(shape, target).single_pass);
  EXPECT_FALSE(choose(shape, target, "portable").single_pass);
  shape.backward = false;
  EXPECT_FALSE(choose(shape, target).single_pass);
}

// Rows that are as long as the pack, for which one head's states would take up to 0.5 TiB.
TEST(Choose, TheScratchOfStickBreakingIsBounded) {
  const Target target(Backend::kCuda);
  for (const int head_dim : {32, 64, 128}) {
    for (const int64_t tokens : {16384, 32768, 65536, 131072, 262144, 524288, 1048576}) {
      StickBreakingShape shape = stick_shape(head_dim, tokens);
      shape.max_seqlen = tokens;
      shape.backward = true;
      const AttentionChoice choice = choose(shape, target);
      EXPECT_LE(choice.bytes, size_t{1} << 30) << head_dim << " " << tokens;
      EXPECT_EQ(choice.single_pass, head_dim <= 64);
      if (choice.single_pass) continue;  // it has no segments
      EXPECT_EQ(choice.tokens == tokens, tokens <= 32768) << head_dim << " " << tokens;
      // Each segment has tiles of 128 queries or 192 keys for all of 132 multiprocessors.
      EXPECT_GE(choice.tokens, std::min<int64_t>(tokens, 192 * 132)) << head_dim << " " << tokens;
      if (tokens > 32768) {
        EXPECT_EQ(choice.tokens % 384, 0) << head_dim << " " << tokens;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::ops
