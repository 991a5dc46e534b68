// Stick-breaking attention on the GPU against the fp64 oracle, with every option and every
// implementation that the GPU has for it.
#include <numbers>

#include "kernels/attention/scratch_sizes.h"
#include "ops/attention.h"
#include "ops/choose.h"
#include "support/gpu.h"
#include "unit/attention/cases.h"

namespace sbtrain::test {
namespace {

using GpuStickBreaking = GpuTest;

struct Outputs {
  std::vector<double> o, rem, stop, dqkv, dgate, dbias;
  std::vector<uint8_t> bits{};  // of all results
};

// The gradients of q, k or v of a [T, qkv_width] matrix.
std::vector<double> columns(const std::vector<double>& all, const Case& c, int64_t part) {
  std::vector<double> out;
  const int64_t first = part == 0 ? 0 : c.width() + (part - 1) * c.key_width();
  for (size_t row = 0; row < all.size(); row += static_cast<size_t>(c.qkv_width())) {
    const auto begin = all.begin() + static_cast<int64_t>(row) + first;
    out.insert(out.end(), begin, begin + (part == 0 ? c.width() : c.key_width()));
  }
  return out;
}

Owned positions_of(const Case& c) {
  std::vector<int32_t> positions;
  for (const int32_t length : c.documents) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  return integers(positions);
}

// In a single pass, so many heads at a time.
void run_single_pass(GpuStream& gpu, const ops::StickBreakingBackward& op, int64_t heads);
// One head at a time, in segments of so many tokens.
void run_in_segments(GpuStream& gpu, const ops::StickBreakingBackward& op, int64_t segment);

// Inputs that bf16 can hold, and the results of the GPU.
struct GpuAttention : Attention {
  explicit GpuAttention(const Case& c) : Attention(c) {
    for (int64_t t = 0; t < c.tokens(); ++t) {
      for (int64_t i = 0; i < c.width(); ++i) qkv.at(t, i) *= c.query_factor;
    }
    for (Owned* x : {&qkv, &dout, &bias}) round_to_bf16(*x);
  }

  // With `segment`, the kernels for Hopper compute one head at a time, and of it segments of so
  // many tokens in the backward pass; with `heads`, so many heads at a time in a single pass.
  Outputs run(const std::string& implementation = "portable", int64_t segment = 0,
              int64_t heads = 0) const {
    GpuStream gpu;
    gpu.stream.set_implementation(implementation);
    const Case& c = config;
    const int64_t T = c.tokens();
    const OnGpu x(gpu, qkv, DType::kBF16, 8);
    const OnGpu g(gpu, gate, DType::kF32);
    const OnGpu r(gpu, bias, DType::kBF16);
    const OnGpu d(gpu, dout, DType::kBF16, 16);
    const OnGpu of_rem(gpu, drem, DType::kF32);
    const OnGpu cu(gpu, bounds, DType::kI32);
    const OnGpu positions(gpu, positions_of(c), DType::kI32);
    const OnGpu out(gpu, DType::kBF16, {T, c.width()}, 8);
    const OnGpu log2_left(gpu, DType::kF32, {c.heads, T});
    const OnGpu stops(gpu, DType::kI32, {c.heads, T});
    const OnGpu dx(gpu, DType::kBF16, {T, c.qkv_width()}, 8);
    const OnGpu dg(gpu, DType::kBF16, {T, c.heads});
    const OnGpu dr(gpu, constant({c.heads, c.head_dim}, 0.5), DType::kF32);
    Sequences s = sequences();
    s.cu_seqlens = cu;
    s.positions_T = positions;
    const auto part = [&](const OnGpu& all, int64_t n) { return Attention::part(all.tensor(), n); };
    const Tensor gates = c.gated ? g.tensor() : Tensor();
    ops::run(gpu, ops::StickBreakingForward{.o_THd = out,
                                            .log2_rem_HT = log2_left,
                                            .stop_HT = stops,
                                            .q_THd = part(x, 0),
                                            .k_THd = part(x, 1),
                                            .v_THd = part(x, 2),
                                            .gate_TH = gates,
                                            .remainder_bias_Hd = r,
                                            .sequences = s,
                                            .params = stickbreaking_params()});
    const ops::StickBreakingBackward backward{
        .dq_THd = part(dx, 0),
        .dk_THd = part(dx, 1),
        .dv_THd = part(dx, 2),
        .dgate_TH = dg,
        .dremainder_bias_Hd = dr,
        .do_THd = d,
        .drem_HT = c.remainder_gradient ? of_rem.tensor() : Tensor(),
        .log2_rem_HT = log2_left,
        .stop_HT = stops,
        .q_THd = part(x, 0),
        .k_THd = part(x, 1),
        .v_THd = part(x, 2),
        .gate_TH = gates,
        .remainder_bias_Hd = r,
        .sequences = s,
        .params = stickbreaking_params()};
    if (heads > 0) {
      run_single_pass(gpu, backward, heads);
    } else if (segment > 0) {
      run_in_segments(gpu, backward, segment);
    } else {
      ops::run(gpu, backward);
    }
    Outputs result{.o = out.values(),
                   .rem = log2_left.values(),
                   .stop = stops.values(),
                   .dqkv = dx.values(),
                   .dgate = dg.values(),
                   .dbias = dr.values()};
    for (double& rem : result.rem) rem = std::exp2(rem);
    for (double& b : result.dbias) b -= 0.5;
    for (const OnGpu* t : {&out, &log2_left, &stops, &dx, &dg, &dr}) {
      const std::vector<uint8_t> bytes = t->raw();
      result.bits.insert(result.bits.end(), bytes.begin(), bytes.end());
    }
    EXPECT_TRUE(out.gaps_intact() && dx.gaps_intact()) << c.describe();
    return result;
  }
};

void run_single_pass(GpuStream& gpu, const ops::StickBreakingBackward& op, int64_t heads) {
  ops::AttentionScratch scratch = op.scratch(gpu.stream);
  ASSERT_EQ(scratch.choice.implementation, ops::Implementation::kHopper);
  const kernels::StickSinglePassScratch layout = kernels::stickbreaking_single_pass_layout(
      op.q_THd.rows(), heads, op.q_THd.cols() / op.params.heads, op.gate_TH.defined(),
      ops::queries_of_key(op.q_THd, op.k_THd));
  scratch.choice.single_pass = true;
  scratch.choice.heads = heads;
  scratch.buffer = gpu.memory.allocate(MemoryClass::kScratch, "states", DType::kF32,
                                       {static_cast<int64_t>(layout.bytes / 4)});
  ops::cuda::run(ops::cuda::Cuda{}, gpu.stream, op, scratch);
}

void run_in_segments(GpuStream& gpu, const ops::StickBreakingBackward& op, int64_t segment) {
  ops::AttentionScratch scratch = op.scratch(gpu.stream);
  ASSERT_EQ(scratch.choice.implementation, ops::Implementation::kHopper);
  const int64_t heads = op.params.heads;
  const kernels::StickHopperScratch layout =
      kernels::stickbreaking_hopper_layout({.tokens = op.q_THd.rows(),
                                            .heads = heads,
                                            .head_dim = op.q_THd.cols() / heads,
                                            .blocks = scratch.choice.blocks,
                                            .group = ops::queries_of_key(op.q_THd, op.k_THd),
                                            .gated = op.gate_TH.defined()},
                                           1, segment);
  scratch.choice.single_pass = false;
  scratch.choice.heads = 1;
  scratch.choice.tokens = layout.segment;
  scratch.choice.blocks = layout.blocks;
  scratch.buffer = gpu.memory.allocate(MemoryClass::kScratch, "states", DType::kF32,
                                       {static_cast<int64_t>(layout.bytes / 4)});
  ops::cuda::run(ops::cuda::Cuda{}, gpu.stream, op, scratch);
}

// The implementations that compute the case on this GPU in both directions, and the program's
// choice ("") where it takes the kernels for Hopper in one direction alone.
std::vector<std::string> implementations(const Case& c) {
  ops::StickBreakingShape shape{.tokens = c.tokens(),
                                .heads = c.heads,
                                .head_dim = c.head_dim,
                                .max_seqlen = c.tokens(),
                                .gated = c.gated,
                                .group = c.group};
  const GpuStream gpu;
  const ops::Implementation forward = ops::choose(shape, gpu.stream.target()).implementation;
  shape.backward = true;
  const ops::Implementation backward = ops::choose(shape, gpu.stream.target()).implementation;
  std::vector<std::string> names = {"portable"};
  if (forward != backward) {
    names.emplace_back("");
  } else if (forward != ops::Implementation::kPortable) {
    names.emplace_back(implementation_name(forward));
  }
  return names;
}

void expect_within_bounds(const GpuAttention& x, const Outputs& got,
                          const std::string& implementation) {
  const Case& c = x.config;
  oracle::Problem p = x.problem();
  if (c.skip_epsilon > 0) {
    for (const double stop : got.stop) p.first_key.push_back(static_cast<int32_t>(stop));
  }
  oracle::Result want = oracle::stickbreaking(p);
  for (double& dq : want.dq) dq *= static_cast<double>(c.query_factor);
  const std::string text =
      implementation + ", " + c.describe() + ", d " + std::to_string(c.head_dim);
  EXPECT_LE(relative_error(got.o, want.o), 4e-3) << "o, " << text;
  EXPECT_LE(relative_error(got.rem, want.row), 4e-3) << "rem, " << text;
  EXPECT_LE(relative_error(columns(got.dqkv, c, 0), want.dq), 8e-3) << "dq, " << text;
  EXPECT_LE(relative_error(columns(got.dqkv, c, 1), want.dk), 8e-3) << "dk, " << text;
  EXPECT_LE(relative_error(columns(got.dqkv, c, 2), want.dv), 8e-3) << "dv, " << text;
  if (c.gated) {
    EXPECT_LE(relative_error(got.dgate, want.dgate), 8e-3) << "dgate, " << text;
  }
  if (c.remainder == ops::Remainder::kBias) {
    EXPECT_LE(relative_error(got.dbias, want.dbias), 8e-3) << "dbias, " << text;
  }
}

// Whether the kernels for Hopper can compute the case in a single pass, which they do only where
// tiles are not few.
bool single_pass_can(const Case& c) {
  return implementations(c).size() > 1 && (c.group == 1 || c.gated) &&
         (c.head_dim == 32 || c.head_dim == 64);
}

void check(const Case& c) {
  const GpuAttention x(c);
  if (single_pass_can(c)) {
    const Outputs got = x.run("hopper", 0, c.heads);
    expect_within_bounds(x, got, "a single pass");
    EXPECT_EQ(got.bits, x.run("hopper", 0, c.heads).bits) << "a single pass, " << c.describe();
  }
  for (const std::string& implementation : implementations(c)) {
    const Outputs got = x.run(implementation);
    expect_within_bounds(x, got, implementation);
    EXPECT_EQ(got.bits, x.run(implementation).bits) << implementation << ", " << c.describe();
  }
}

TEST_F(GpuStickBreaking, EveryOption) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const Case& c : stickbreaking_options({.documents = {1, 2, 127, 128, 129, 70, 1},
                         .heads = 3,
                         .head_dim = 32,
                         .inputs = inputs})) {
      check(c);
    }
  }
}

// Eight heads of queries, in groups down to multi-query attention, with and without a gate and the
// remainder, in packs of few tiles and of many.
TEST_F(GpuStickBreaking, GroupsOfHeads) {
  for (const int group : {2, 4, 8}) {
    for (const Case& c : stickbreaking_options({.documents = {1, 2, 127, 128, 129, 300},
                         .heads = 8,
                         .head_dim = 32,
                         .group = group})) {
      check(c);
    }
    for (const int64_t d : {40, 64, 128, 256}) {
      for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
        for (const bool gated : {false, true}) {
          Case c{.documents = {3, 1500, 70},
                 .heads = 8,
                 .head_dim = d,
                 .group = group,
                 .gated = gated};
          c.skip_epsilon = skip_epsilon;
          check(c);
        }
      }
    }
  }
}

// 33 MB of states a head: those of a group of 18 do not fit 512 MiB, nor, four times as many, the
// 1 GiB of the kernels for Hopper.
TEST_F(GpuStickBreaking, GroupsGoThroughTheWorkspaceInParts) {
  for (const int64_t d : {8, 32}) {
    Case c{.documents = {16000, 384}, .heads = 18, .head_dim = d, .group = 18};
    c.remainder = ops::Remainder::kValue;
    check(c);
  }
}

TEST_F(GpuStickBreaking, EveryHeadDimension) {
  for (const int64_t d : {8, 16, 32, 40, 64, 96, 128, 136, 256}) {
    for (const bool gated : {false, true}) {
      check({.documents = {1, 2, 127, 128, 129, 500}, .heads = 2, .head_dim = d, .gated = gated});
    }
  }
}

// Every length up to a tile and some beyond it, in one pack and alone.
TEST_F(GpuStickBreaking, EveryLength) {
  Case c{.documents = {}, .heads = 1, .head_dim = 64};
  for (int32_t length = 1; length <= 64; ++length) c.documents.push_back(length);
  check(c);
  for (const int32_t length : {1, 2, 3, 63, 64, 65, 127, 128, 129, 191}) {
    check({.documents = {length}, .heads = 1, .head_dim = 64});
  }
}

TEST_F(GpuStickBreaking, LongDocuments) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const int64_t d : {32, 64, 128}) {
      // One head has a multiprocessor for each of the smallest tiles, and so these; two have not.
      for (const int heads : {1, 2}) {
        for (const bool gated : {false, true}) {
          check({.documents = {5, 2048, 33, 4096},
                 .heads = heads,
                 .head_dim = d,
                 .inputs = inputs,
                 .gated = gated,
                 .remainder_gradient = gated});
        }
      }
    }
    check({.documents = {16384}, .heads = 1, .head_dim = 64, .inputs = inputs});
  }
}

// Half of a tile of keys may belong to a document that has ended while many queries still see the
// other half: what works on the first half must not hold up the second.
TEST_F(GpuStickBreaking, DocumentsEndInTheMiddleOfTiles) {
  for (const int64_t d : {32, 64, 128}) {
    for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
      for (const int heads : {2, 4}) {  // of small tiles and of the usual ones
        for (const bool gated : {false, true}) {
          Case c{.documents = {100, 1000, 60, 1100, 5, 700},
                 .heads = heads,
                 .head_dim = d,
                 .gated = gated};
          c.skip_epsilon = skip_epsilon;
          check(c);
          c.documents = {64, 1000, 216, 1200};
          check(c);
        }
      }
    }
  }
}

TEST_F(GpuStickBreaking, ManyHeadsGoThroughTheWorkspaceInGroups) {
  // 16384 tokens, 253 blocks: 33 MB a head, more than 512 MiB in all.
  check({.documents = {16000, 384}, .heads = 18, .head_dim = 8});
}

// Queries that have been multiplied by scale * log2(e).
TEST_F(GpuStickBreaking, FoldedScale) {
  for (const Inputs inputs : {Inputs::kStandard, Inputs::kTrained}) {
    for (const int64_t d : {32, 64, 128}) {
      for (const int heads : {1, 4}) {  // of small tiles and of the usual ones
        Case c{.documents = {5, 2048, 33, 1500}, .heads = heads, .head_dim = d, .inputs = inputs};
        c.query_factor = c.logit_scale() * std::numbers::log2e_v<float>;
        c.scale = kernels::kFoldedScale;
        check(c);
      }
    }
  }
}

// One head has fewer blocks of keys than there are multiprocessors, all heads more. So the blocks
// that wait for each other run at other times.
TEST_F(GpuStickBreaking, BitsDoNotDependOnTheNumberOfBlocks) {
  for (const int64_t d : {32, 64}) {
    for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
      for (const bool gated : {false, true}) {
        Case c{.documents = {2500, 100, 3000}, .heads = 6, .head_dim = d};
        c.skip_epsilon = skip_epsilon;
        c.gated = gated;
        c.remainder = ops::Remainder::kValue;
        if (!single_pass_can(c)) GTEST_SKIP() << "only the kernels for Hopper have a single pass";
        const GpuAttention x(c);
        const Outputs all = x.run("hopper", 0, 6);
        expect_within_bounds(x, all, "a single pass");
        for (const int64_t heads : {1, 4}) {
          EXPECT_EQ(x.run("hopper", 0, heads).bits, all.bits) << c.describe() << ", " << heads;
        }
      }
    }
  }
}

// The states of one head of a small pack, cut as where they do not fit.
TEST_F(GpuStickBreaking, SegmentsChangeNoBit) {
  for (const int64_t d : {32, 64, 128}) {
    for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
      for (const int length : {1100, 9000}) {  // of small tiles and of the usual ones
        for (const auto& [group, gated] : {std::pair{1, false}, {4, false}, {1, true}, {4, true}}) {
          if (gated && group > 1 && d <= 64) continue;  // where they fit, a single pass
          Case c{.documents = {100, length, 400},
                 .heads = 4,
                 .head_dim = d,
                 .group = group,
                 .gated = gated};
          c.skip_epsilon = skip_epsilon;
          c.remainder = ops::Remainder::kValue;
          c.remainder_gradient = true;
          if (implementations(c).size() == 1) {
            GTEST_SKIP() << "only the kernels for Hopper have them";
          }
          const GpuAttention x(c);
          // In two phases, not in a single pass.
          const Outputs whole = x.run("hopper", group == 1 ? c.tokens() : 0);
          for (const int64_t segment : {384, 4608}) {
            EXPECT_EQ(x.run("hopper", segment).bits, whole.bits) << c.describe() << ", " << segment;
          }
          if (length == 1100) expect_within_bounds(x, whole, "hopper");
        }
      }
    }
  }
}

// Adds what row j of a pack of one document and one head gives in double precision.
void add_row(GpuAttention& x, int64_t j, oracle::Result& sums) {
  const int64_t d = x.config.head_dim;
  const double scale = x.config.logit_scale();
  const auto at = [&](int64_t t, int64_t part, int64_t i) {
    return static_cast<double>(x.qkv.at(t, part * d + i));
  };
  std::vector<double> a(static_cast<size_t>(j)), beta(a.size());
  double left = 1.0;
  for (int64_t i = j - 1; i >= 0; --i) {
    double z = 0;
    for (int64_t c = 0; c < d; ++c) z += scale * at(j, 0, c) * at(i, 1, c);
    const auto n = static_cast<size_t>(i);
    beta[n] = 1.0 / (1.0 + std::exp(-z));
    a[n] = beta[n] * left;
    left *= 1.0 - beta[n];
  }
  sums.row[static_cast<size_t>(j)] = left;
  double before = 0;  // the sum of g over the keys up to this one
  for (int64_t i = 0; i < j; ++i) {
    const auto n = static_cast<size_t>(i);
    double g = 0;
    for (int64_t c = 0; c < d; ++c) g += a[n] * x.dout.at(j, c) * at(i, 2, c);
    before += g;
    const double dz = scale * (g - beta[n] * before);
    for (int64_t c = 0; c < d; ++c) {
      sums.o[static_cast<size_t>(j * d + c)] += a[n] * at(i, 2, c);
      sums.dq[static_cast<size_t>(j * d + c)] += dz * at(i, 1, c);
      sums.dk[static_cast<size_t>(i * d + c)] += dz * at(j, 0, c);
      sums.dv[static_cast<size_t>(i * d + c)] += a[n] * x.dout.at(j, c);
    }
  }
}

// The states of one head of such a row would take 34 GB. Some rows alone have a gradient, so that
// these give the gradients of all keys. A row uses up its stick over all of its keys.
TEST_F(GpuStickBreaking, RowsWhoseStatesDoNotFit) {
  constexpr int64_t kTokens = 262144, kRows = 24;
  Case c{.documents = {kTokens}, .heads = 1, .head_dim = 32, .inputs = Inputs::kTrained};
  c.scale = 0.36f;  // logits around -11.5
  if (implementations(c).size() == 1) GTEST_SKIP() << "only the kernels for Hopper bound them";
  GpuAttention x(c);
  std::vector<int64_t> rows = {1, 64, kTokens - 1};
  for (int64_t i = 0; i < kRows; ++i) rows.push_back((i + 1) * kTokens / (kRows + 1) + 7 * i);
  Owned dout = random_normal("do", {kTokens, c.width()});
  std::fill_n(x.dout.f32(), x.dout.tensor().numel(), 0.0f);
  for (const int64_t j : rows) {
    for (int64_t i = 0; i < c.width(); ++i) x.dout.at(j, i) = dout.at(j, i);
  }
  round_to_bf16(x.dout);
  oracle::Problem shape;
  shape.heads = 1;
  shape.tokens = kTokens;
  shape.q.resize(static_cast<size_t>(kTokens * c.width()));
  shape.k.resize(shape.q.size()), shape.v.resize(shape.q.size());
  oracle::Result want(shape);
  for (const int64_t j : rows) add_row(x, j, want);
  const Outputs got = x.run("hopper");
  std::vector<double> o, rem, o_want, rem_want;
  for (const int64_t j : rows) {
    rem.push_back(got.rem[static_cast<size_t>(j)]);
    rem_want.push_back(want.row[static_cast<size_t>(j)]);
    for (int64_t i = j * c.width(); i < (j + 1) * c.width(); ++i) {
      o.push_back(got.o[static_cast<size_t>(i)]);
      o_want.push_back(want.o[static_cast<size_t>(i)]);
    }
  }
  EXPECT_LE(relative_error(o, o_want), 4e-3);
  EXPECT_LE(relative_error(rem, rem_want), 4e-3);
  EXPECT_LE(relative_error(columns(got.dqkv, c, 0), want.dq), 8e-3);
  EXPECT_LE(relative_error(columns(got.dqkv, c, 1), want.dk), 8e-3);
  EXPECT_LE(relative_error(columns(got.dqkv, c, 2), want.dv), 8e-3);
}

TEST_F(GpuStickBreaking, SkippingIsExactForWhatIsRead) {
  for (const int64_t d : {32, 64, 128}) {
    for (const bool gated : {false, true}) {
      Case c{.documents = {700, 1, 1500}, .heads = 2, .head_dim = d, .gated = gated};
      c.skip_epsilon = 0x1p-24f;
      const GpuAttention x(c);
      Case all = c;
      all.skip_epsilon = 0;
      for (const std::string& implementation : implementations(c)) {
        const Outputs got = x.run(implementation);
        expect_within_bounds(x, got, implementation);
        EXPECT_GT(*std::max_element(got.stop.begin(), got.stop.end()), 0) << c.describe();
        EXPECT_LE(relative_error(got.o, GpuAttention(all).run(implementation).o), 1e-3)
            << implementation << ", " << c.describe();
        EXPECT_EQ(got.bits, x.run(implementation).bits) << implementation << ", " << c.describe();
      }
    }
  }
}

// With logits of +-100 and more, a stick is used up completely or not at all. Results must be
// finite, and right as far as fp32 permits.
TEST_F(GpuStickBreaking, ExtremeLogits) {
  for (const double scale : {-10.0, 100.0, -100.0, 1e4}) {
    for (const bool gated : {false, true}) {
      Case c{.documents = {300, 77}, .heads = 2, .head_dim = 32, .gated = gated};
      c.scale = static_cast<float>(scale);
      const GpuAttention x(c);
      for (const std::string& implementation : implementations(c)) {
        const Outputs got = x.run(implementation);
        for (const auto* values : {&got.o, &got.rem, &got.dqkv}) {
          for (const double value : *values) {
            ASSERT_TRUE(std::isfinite(value)) << implementation << ", " << c.describe();
          }
        }
        EXPECT_LE(relative_error(got.o, oracle::stickbreaking(x.problem()).o), 4e-3)
            << implementation << ", " << scale;
      }
    }
  }
}

// Keys that a query does not see stay hidden where nothing else tells keys apart.
TEST_F(GpuStickBreaking, ScaleOfZero) {
  for (const int64_t d : {32, 64, 128}) {
    for (const bool gated : {false, true}) {
      Case c{.documents = {300, 77, 700}, .heads = 2, .head_dim = d, .gated = gated};
      c.scale = 0.0f;
      check(c);
    }
  }
}

// Gradients, where logits are anywhere from 0 to beyond the largest that is not clamped (a standard
// deviation of 22 to 45 nats): both passes must clamp the same keys.
TEST_F(GpuStickBreaking, LargeLogits) {
  for (const int64_t d : {32, 64, 128}) {
    for (const bool gated : {false, true}) {
      Case c{.documents = {300, 77}, .heads = 2, .head_dim = d, .gated = gated};
      c.scale = 4.0f;
      check(c);
    }
  }
}

// What one implementation saves in its forward pass serves the other one's backward pass: the
// remainders are the same number up to rounding, and so are the outputs.
TEST_F(GpuStickBreaking, ImplementationsSaveTheSame) {
  for (const int64_t d : {32, 64, 128}) {
    const Case c{.documents = {700, 1, 1500}, .heads = 2, .head_dim = d};
    const std::vector<std::string> names = implementations(c);
    if (names.size() == 1) GTEST_SKIP() << "this GPU has only the portable kernels";
    const GpuAttention x(c);
    const Outputs a = x.run(names[0]), b = x.run(names[1]);
    EXPECT_LE(relative_error(b.o, a.o), 1e-3) << d;
    EXPECT_LE(relative_error(b.rem, a.rem), 1e-5) << d;
    EXPECT_EQ(a.stop, b.stop) << d;
  }
}

// Large finite numbers in neighbouring documents change nothing.
TEST_F(GpuStickBreaking, NothingLeaksBetweenDocuments) {
  const Case c{.documents = {100, 60, 200}, .heads = 2, .head_dim = 64};
  GpuAttention clean(c), poisoned(c);
  for (int64_t t = 0; t < c.tokens(); ++t) {
    if (t >= 100 && t < 160) continue;
    for (int64_t i = 0; i < 3 * c.width(); ++i) poisoned.qkv.at(t, i) = (i % 2 ? -1e18f : 1e18f);
    for (int64_t i = 0; i < c.width(); ++i) poisoned.dout.at(t, i) = 1e18f;
  }
  round_to_bf16(poisoned.qkv);
  round_to_bf16(poisoned.dout);
  for (const std::string& implementation : implementations(c)) {
    const Outputs a = clean.run(implementation);
    const Outputs b = poisoned.run(implementation);
    for (int64_t t = 100; t < 160; ++t) {
      for (int64_t i = 0; i < c.width(); ++i) {
        const auto at = static_cast<size_t>(t * c.width() + i);
        ASSERT_EQ(a.o[at], b.o[at]) << implementation << ", " << t;
      }
      for (int64_t i = 0; i < 3 * c.width(); ++i) {
        const auto at = static_cast<size_t>(t * 3 * c.width() + i);
        ASSERT_EQ(a.dqkv[at], b.dqkv[at]) << implementation << ", " << t;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
