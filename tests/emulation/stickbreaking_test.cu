// The Hopper kernels of stick-breaking attention, emulated (emulator.h), against the fp64 oracle.
#include "emulation/stickbreaking.cuh"

namespace sbtrain::emulation {
namespace {

// What is left of the sticks goes to nothing, or to the values of the queries.
template <int kD, bool kFewTiles = false>
void check_all() {
  for (const std::vector<int32_t>& documents : kPacks) {
    for (const bool to_value : {false, true}) {
      StickBreaking x(documents, kD);
      test::oracle::Problem problem = x.oracle();
      if (to_value) {
        problem.remainder = test::oracle::Remainder::kValue;
        x.give_remainder_to_values();
      }
      const test::oracle::Result want = test::oracle::stickbreaking(problem);
      for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
        for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
          SCOPED_TRACE(describe_case(documents, timing) + ", epsilon " +
                       std::to_string(skip_epsilon) + (to_value ? ", remainder to values" : ""));
          ASSERT_NO_THROW((x.run<kD, kFewTiles>(timing, skip_epsilon)));
          x.check(want);
        }
      }
    }
  }
}

// Gates, a gradient of the remainder itself and a token that sees its own key, alone and together.
template <int kD, bool kFewTiles = false>
void check_options() {
  for (const int options : {1, 2, 5, 7}) {
    const bool gated = (options & 1) != 0, of_remainder = (options & 2) != 0;
    for (const std::vector<int32_t>& documents : kPacks) {
      StickBreaking x(documents, kD);
      test::oracle::Problem problem = x.oracle();
      if (gated) problem.gate = x.give_gates();
      if (of_remainder) problem.drem = x.give_remainder_a_gradient();
      if ((options & 4) != 0) {
        problem.attend_current = true;
        x.attend_current();
        problem.remainder = test::oracle::Remainder::kValue;
        x.give_remainder_to_values();
      }
      const test::oracle::Result want = test::oracle::stickbreaking(problem);
      for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
        const Timing timing = skip_epsilon > 0 ? Timing::kAtOnce : Timing::kLate;
        SCOPED_TRACE(describe_case(documents, timing) + (gated ? ", gates" : "") +
                     (of_remainder ? ", gradient of the remainder" : ""));
        ASSERT_NO_THROW((x.run<kD, kFewTiles>(timing, skip_epsilon)));
        x.check(want);
      }
    }
  }
}
TEST(EmulatedStickBreaking, OptionsOfHeadsOf32) {
  check_options<32>();
  check_options<32, true>();
}
TEST(EmulatedStickBreaking, OptionsOfHeadsOf64) {
  check_options<64>();
}
TEST(EmulatedStickBreaking, OptionsOfHeadsOf128) {
  check_options<128>();
}

TEST(EmulatedStickBreaking, HeadsOf32) {
  check_all<32>();
}
TEST(EmulatedStickBreaking, FewTilesOfHeadsOf32) {
  check_all<32, true>();
}
TEST(EmulatedStickBreaking, HeadsOf64) {
  check_all<64>();
}
TEST(EmulatedStickBreaking, HeadsOf128) {
  check_all<128>();
}

// Heads of queries that share keys and values.
template <int kD, bool kFewTiles = false>
void check_groups(bool gated = false) {
  for (const Heads& heads : kGroups) {
    StickBreaking x(kPacks[2], kD, heads);
    test::oracle::Problem problem = x.oracle();
    if (gated) problem.gate = x.give_gates();
    problem.remainder = test::oracle::Remainder::kValue;
    x.give_remainder_to_values();
    const test::oracle::Result want = test::oracle::stickbreaking(problem);
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      SCOPED_TRACE(describe_case(kPacks[2], timing) + ", groups of " + std::to_string(x.group));
      ASSERT_NO_THROW((x.run<kD, kFewTiles>(timing, 0x1p-24f)));
      x.check(want);
    }
  }
}
TEST(EmulatedStickBreaking, GroupsOfHeadsOf32) {
  check_groups<32>();
  check_groups<32, true>();
}
TEST(EmulatedStickBreaking, GroupsOfHeadsOf64) {
  check_groups<64>();
}
TEST(EmulatedStickBreaking, GroupsOfHeadsOf128) {
  check_groups<128>();
}
TEST(EmulatedStickBreaking, GatesOfGroups) {
  check_groups<32>(true);
  check_groups<64>(true);
  check_groups<128>(true);
}

// Whatever the queries and keys are, all logits are then 0, and keys that no row sees stay hidden.
template <int kD>
void check_scale_of_zero() {
  for (const float zero : {0.0f, -0.0f}) {
    for (const bool gated : {false, true}) {
      StickBreaking x(kPacks[2], kD);
      test::oracle::Problem problem = x.oracle();
      if (gated) problem.gate = x.give_gates();
      problem.scale = 0;
      x.set_scale(zero);
      SCOPED_TRACE(gated ? "gates" : "no gates");
      ASSERT_NO_THROW((x.run<kD, false>(Timing::kAtOnce, 0.0f)));
      x.check(test::oracle::stickbreaking(problem));
    }
  }
}
TEST(EmulatedStickBreaking, ScaleOfZero) {
  check_scale_of_zero<32>();
  check_scale_of_zero<64>();
  check_scale_of_zero<128>();
}

// Queries that have been multiplied by scale * log2(e) and then rounded.
template <int kD>
void check_folded() {
  StickBreaking x(kPacks[2], kD);
  test::oracle::Problem problem = x.oracle();
  const float factor = x.fold_scale();
  problem.q = to_f64(x.q);
  problem.scale = std::log(2.0);
  test::oracle::Result want = test::oracle::stickbreaking(problem);
  for (double& dq : want.dq) dq *= double(factor);
  for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
    ASSERT_NO_THROW((x.run<kD, false, Folded>(timing, 0.0f)));
    x.check(want);
  }
}
TEST(EmulatedStickBreaking, FoldedScale) {
  check_folded<32>();
  check_folded<64>();
  check_folded<128>();
}

// Segments of queries and keys, as where the states of a head do not fit, change no bit, nor does
// one segment of a head whose group does not fit. Sticks are used up within the segments, at their
// edges and beyond them.
template <int kD, bool kFewTiles = false>
void check_segments(bool gated = false) {
  for (const std::vector<int32_t>& documents :
       std::vector<std::vector<int32_t>>{{800}, {100, 660, 40}}) {
    for (const auto& [skip_epsilon, heads] :
         {std::pair{0.0f, Heads{}}, std::pair{0x1p-24f, Heads{}},
          std::pair{0x1p-24f, Heads{4, 2}}}) {
      StickBreaking x(documents, kD, heads);
      x.give_remainder_to_values();
      x.give_remainder_a_gradient();
      if (gated) x.give_gates();
      ASSERT_NO_THROW((x.run<kD, kFewTiles>(Timing::kAtOnce, skip_epsilon)));
      const auto dq = to_f64(x.dq), dk = to_f64(x.dk), dv = to_f64(x.dv);
      const auto dgate = to_f64(x.dgate());
      for (const int steps : {1, 3}) {
        const int segment = steps * static_cast<int>(kHopperSegmentStep);
        if (segment > x.tokens() && x.group == 1) continue;  // there are no segments
        x.cut_into_segments(segment);
        for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
          // Once for each shape, as sticks that end early let a segment begin with nothing to do.
          if (timing == Timing::kAtOnce && (skip_epsilon == 0 || steps > 1)) continue;
          SCOPED_TRACE(describe_case(documents, timing) + ", epsilon " +
                       std::to_string(skip_epsilon) + ", groups of " + std::to_string(x.group) +
                       ", segments of " + std::to_string(segment));
          ASSERT_NO_THROW((x.run<kD, kFewTiles>(timing, skip_epsilon)));
          EXPECT_EQ(to_f64(x.dq), dq);
          EXPECT_EQ(to_f64(x.dk), dk);
          EXPECT_EQ(to_f64(x.dv), dv);
          EXPECT_EQ(to_f64(x.dgate()), dgate);
        }
      }
    }
  }
}
// The longest tiles have to come first: in any other order some multiprocessors end late.
TEST(EmulatedStickBreaking, TilesTakeAsManyStepsAsTheySeeBlocks) {
  const StickBreaking x({600}, 64);
  using Queries = StickQueryGradientMainloop<QueryGradientShape<64>>;
  using Keys = StickKeyGradientMainloop<KeyGradientShape<64>>;
  ASSERT_EQ(Queries::kTileRows, 128);
  EXPECT_EQ(x.steps_of_tiles<Queries>(), (std::vector<int>{2, 4, 6, 8, 10}));
  std::vector<int> of_keys;
  for (int first = 0; first < 600; first += Keys::kTileRows)
    of_keys.push_back((600 - first + 63) / 64);
  EXPECT_EQ(x.steps_of_tiles<Keys>(), of_keys);
}

TEST(EmulatedStickBreaking, SegmentsOfHeadsOf32) {
  check_segments<32>();
  check_segments<32, true>();
}
TEST(EmulatedStickBreaking, SegmentsOfHeadsOf64) {
  check_segments<64>();
}
TEST(EmulatedStickBreaking, SegmentsOfHeadsOf128) {
  check_segments<128>();
}

TEST(EmulatedStickBreaking, SegmentsWithGates) {
  check_segments<32>(true);
  check_segments<64>(true);
  check_segments<128>(true);
}

// Part of each stick is taken by keys of logit 0, all of the rest by the first of many keys whose
// logits are clamped. What is left after four of these is below the smallest normal number, but the
// key that takes it must get it: numbers below that one may not become zero.
TEST(EmulatedStickBreaking, SticksEndInSaturatedKeys) {
  constexpr int kD = 32, kSaturated = 60, kHalf = 4;
  StickBreaking x({256}, kD);
  for (size_t i = 0; i < x.q.size(); ++i) {
    const int token = static_cast<int>(i) / (x.heads * kD);
    const float key = token < kSaturated ? 70.0f : token < kSaturated + kHalf ? 0.0f : -70.0f;
    x.q[i] = __float2bfloat16(i % kD == 0 ? 8.0f : 0.0f);
    x.k[i] = __float2bfloat16(i % kD == 0 ? key : 0.0f);
  }
  const test::oracle::Result want = test::oracle::stickbreaking(x.oracle());
  ASSERT_NO_THROW((x.run<kD, false>(Timing::kAtOnce, 0.0f)));
  EXPECT_LE(test::relative_error(to_f64(x.o), want.o), kOutputError);
}

// A third of the queries has logits that are `factor` times as large as the others'.
template <int kD>
void check_logits(float factor, bool gradients, bool gated = false) {
  StickBreaking x({70, 122}, kD);
  test::oracle::Problem problem = x.oracle();
  if (gated) problem.gate = x.give_gates();
  for (size_t i = 0; i < x.q.size(); ++i) {
    const int token = static_cast<int>(i) / (x.heads * kD);
    if (token % 3 == 0) x.q[i] = __float2bfloat16(factor * __bfloat162float(x.q[i]));
  }
  problem.q = to_f64(x.q);
  const test::oracle::Result want = test::oracle::stickbreaking(problem);
  ASSERT_NO_THROW((x.run<kD, false>(Timing::kAtOnce, 0.0f)));
  if (gradients) return x.check(want);
  EXPECT_LE(test::relative_error(to_f64(x.o), want.o), kOutputError) << kD;
  for (const auto* values : {&x.o, &x.dq, &x.dk, &x.dv}) {
    for (const bf16 value : *values) ASSERT_TRUE(std::isfinite(__bfloat162float(value))) << kD;
  }
}
// Some are above 100 nats, so that no product of 1 + e is finite unless e is clamped.
TEST(EmulatedStickBreaking, LargeLogits) {
  check_logits<32>(64.0f, true);
  check_logits<64>(64.0f, true);
  check_logits<128>(64.0f, true);
  check_logits<32>(64.0f, true, true);
  check_logits<64>(64.0f, true, true);
  check_logits<128>(64.0f, true, true);
}
// An e that is infinite stands beside one that is zero, so that their product is not a number. The
// gradients of such logits are no larger than what is rounded.
TEST(EmulatedStickBreaking, ExtremeLogits) {
  check_logits<32>(4096.0f, false);
  check_logits<64>(4096.0f, false);
  check_logits<128>(4096.0f, false);
  check_logits<64>(4096.0f, false, true);
}

}  // namespace
}  // namespace sbtrain::emulation
