// The backward pass of stick-breaking attention in a single pass, emulated (emulator.h), against
// the fp64 oracle.
#include "emulation/stickbreaking_forward.cuh"
#include "kernels/attention/single_pass_arguments_hopper.cuh"
#include "kernels/attention/single_pass_ends_hopper.cuh"

namespace sbtrain::emulation {
namespace {

using namespace kernels;  // what runs is theirs

class SinglePass : public Attention {
 public:
  SinglePass(const std::vector<int32_t>& documents, int head_dim, Heads heads_ = {})
      : Attention(documents, head_dim, heads_),
        stop_(row.size()),
        bias_(random_bf16("bias", int64_t{heads} * head_dim)),
        want_(oracle()) {
    describe(problem_);
    problem_.log2_rem = row.data();
    problem_.stop = stop_.data();
    problem_.remainder_bias = bias_.data();
    want_.bias = to_f64(bias_);
    compute_heads_at_a_time(heads);
  }

  void fold_scale() {
    fold_scale_into(problem_);
    want_.scale = std::log(2.0);
    want_.q = to_f64(q);
  }
  // Of every third token.
  void multiply_queries(float factor) {
    for (size_t i = 0; i < q.size(); ++i) {
      const int token = static_cast<int>(i) / (heads * head_dim);
      if (token % 3 == 0) q[i] = __float2bfloat16(factor * __bfloat162float(q[i]));
    }
    want_.q = to_f64(q);
  }
  void give_remainder_to(StickRemainder remainder) {
    problem_.remainder = remainder;
    want_.remainder = remainder == StickRemainder::kNone    ? test::oracle::Remainder::kNone
                      : remainder == StickRemainder::kValue ? test::oracle::Remainder::kValue
                                                            : test::oracle::Remainder::kBias;
  }
  // Of rem itself, apart from what flows through o.
  void give_remainder_a_gradient() {
    const test::Owned x = test::random_normal("drem", {static_cast<int64_t>(row.size())});
    drem_.assign(x.f32(), x.f32() + row.size());
    problem_.drem = drem_.data();
    want_.drem = to_f64(drem_);
  }
  // Gates in (0, 1], of which some are 1 and some so small that they close their keys.
  void give_gates() {
    gate_ = random_gates(row.size());
    problem_.gate = gate_.data();
    problem_.gate_stride = problem_.dgate_stride = heads;
    want_.gate = to_f64(gate_);
    compute_heads_at_a_time(heads);
  }
  const std::vector<bf16>& dgate() const { return dgate_; }
  void attend_current() { problem_.attend_current = want_.attend_current = true; }
  void compute_heads_at_a_time(int heads) {
    workspace_.resize(
        stickbreaking_single_pass_layout(tokens(), heads, head_dim, !gate_.empty(), group).bytes /
        sizeof(float));
    problem_.workspace = workspace_.data();
    problem_.workspace_heads = heads;
  }
  // An empty document at the beginning, in the middle and at the end.
  void add_empty_documents() {
    bounds.push_back(bounds.back());
    bounds.insert(bounds.begin() + 1, 2, bounds[1]);
    bounds.insert(bounds.begin(), 0);
    problem_.cu_seqlens = bounds.data();
    problem_.sequences = static_cast<int>(bounds.size()) - 1;
  }

  // What is skipped is less than the errors that are allowed.
  template <int kD, template <typename> class Kind = Unfolded>
  void run(Timing timing, float skip_epsilon = 0.0f) {
    clear_results();
    std::fill(stop_.begin(), stop_.end(), INT32_MIN);
    std::fill(workspace_.begin(), workspace_.end(), NAN);
    dgate_.assign(gate_.size(), bf16(NAN));
    problem_.dgate = dgate_.data();
    problem_.skip_epsilon = skip_epsilon;
    if (gate_.empty()) {
      run_forward<Kind<HopperForwardShape<kD, false, false>>>(timing, problem_);
      backward<kD, Kind<SinglePassShape<kD>>>(timing);
    } else {
      run_forward<HopperForwardShape<kD, true>>(timing, problem_);
      backward<kD, Gated<SinglePassShape<kD>>>(timing);
    }
  }
  void check(const test::oracle::Result& want) const {
    expect_near(want);
    if (!gate_.empty()) {
      EXPECT_LE(test::relative_error(to_f64(dgate_), want.dgate), kGradientError);
    }
  }
  test::oracle::Result want() const {
    test::oracle::Result want = test::oracle::stickbreaking(want_);
    for (double& dq : want.dq) dq *= double(problem_.query_factor);
    return want;
  }

 private:
  template <int kD, typename Shape>
  void backward(Timing timing) {
    static_assert(kSharedBytes<SinglePassShared<Shape>> <= kMaxSharedBytes);
    for (int head = 0; head < heads; head += problem_.workspace_heads) {
      const SinglePassArguments x = single_pass_arguments<Shape>(problem_, head);
      const Index tiles = {static_cast<unsigned>(x.tiles), static_cast<unsigned>(x.heads)};
      launch(tiles, {kSinglePassBeginThreads}, timing,
             [&] { begin_single_pass_kernel(x, Shape::kKeys); });
      if constexpr (Shape::kGated) {
        const auto blocks = static_cast<unsigned>(ceil_div(tokens(), kStickKeys));
        launch({blocks, static_cast<unsigned>(x.heads)}, {kStickKeys}, timing,
               [&] { prepare_gates_kernel(x); });
      }
      launch({}, {Shape::kThreads}, timing, [&] { single_pass_hopper_kernel<Shape>(x); });
      launch(tiles, {kSinglePassEndThreads}, timing, [&] { end_single_pass_kernel<kD>(x); });
      if (group == 1) continue;
      const Index key_blocks = {static_cast<unsigned>(ceil_div(tokens(), kStickKeys)),
                                static_cast<unsigned>(x.heads / group)};
      launch(key_blocks, {kSinglePassEndThreads}, timing, [&] { add_groups_kernel<kD>(x); });
    }
  }

  std::vector<int32_t> stop_;
  std::vector<bf16> bias_;
  std::vector<float> gate_, drem_, workspace_;
  std::vector<bf16> dgate_;
  StickBreakingProblem problem_;
  test::oracle::Problem want_;
};

constexpr StickRemainder kRemainders[] = {StickRemainder::kNone, StickRemainder::kValue,
                                          StickRemainder::kBias};
template <int kD>
void check_all() {
  std::vector<std::vector<int32_t>> packs = kPacks;
  packs.push_back({900});
  for (const std::vector<int32_t>& documents : packs) {
    for (const StickRemainder remainder : kRemainders) {
      SinglePass x(documents, kD);
      x.give_remainder_to(remainder);
      const test::oracle::Result want = x.want();
      for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
        // Remainders are read before the loop and after it.
        if (timing == Timing::kLate && remainder != StickRemainder::kValue) continue;
        for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
          SCOPED_TRACE(describe_case(documents, timing) + ", epsilon " +
                       std::to_string(skip_epsilon) + ", remainder " +
                       std::to_string(int(remainder)));
          ASSERT_NO_THROW((x.run<kD>(timing, skip_epsilon)));
          x.expect_near(want);
        }
      }
    }
  }
}
TEST(EmulatedSinglePass, HeadsOf32) {
  check_all<32>();
}
TEST(EmulatedSinglePass, HeadsOf64) {
  check_all<64>();
}

template <int kD>
void check_folded() {
  for (const std::vector<int32_t>& documents : kPacks) {
    SinglePass x(documents, kD);
    x.fold_scale();
    const test::oracle::Result want = x.want();
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      SCOPED_TRACE(describe_case(documents, timing));
      ASSERT_NO_THROW((x.run<kD, Folded>(timing)));
      x.expect_near(want);
    }
  }
}
TEST(EmulatedSinglePass, FoldedScale) {
  check_folded<32>();
  check_folded<64>();
}

TEST(EmulatedSinglePass, AttendCurrent) {
  for (const std::vector<int32_t>& documents : kPacks) {
    SinglePass x(documents, 64);
    x.attend_current();
    x.give_remainder_to(StickRemainder::kValue);
    SCOPED_TRACE(describe_case(documents, Timing::kAtOnce));
    ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
    x.expect_near(x.want());
  }
}

TEST(EmulatedSinglePass, GradientOfTheRemainder) {
  for (const std::vector<int32_t>& documents : kPacks) {
    for (const StickRemainder remainder : kRemainders) {
      SinglePass x(documents, 64);
      x.give_remainder_to(remainder);
      x.give_remainder_a_gradient();
      const test::oracle::Result want = x.want();
      for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
        SCOPED_TRACE(describe_case(documents, Timing::kAtOnce) + ", remainder " +
                     std::to_string(int(remainder)));
        ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, skip_epsilon)));
        x.expect_near(want);
      }
    }
  }
}

// Gates alone, and with a gradient of the remainder and a token that sees its own key.
template <int kD>
void check_gates() {
  std::vector<std::vector<int32_t>> packs = kPacks;
  packs.push_back({900});
  for (const std::vector<int32_t>& documents : packs) {
    for (const bool alone : {true, false}) {
      SinglePass x(documents, kD);
      x.give_gates();
      if (!alone) {
        x.give_remainder_to(StickRemainder::kValue);
        x.give_remainder_a_gradient();
        x.attend_current();
      }
      const test::oracle::Result want = x.want();
      for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
        for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
          SCOPED_TRACE(describe_case(documents, timing) + ", epsilon " +
                       std::to_string(skip_epsilon) + (alone ? "" : ", options"));
          ASSERT_NO_THROW((x.run<kD>(timing, skip_epsilon)));
          x.check(want);
        }
      }
    }
  }
}
TEST(EmulatedSinglePass, GatesOfHeadsOf32) {
  check_gates<32>();
}
TEST(EmulatedSinglePass, GatesOfHeadsOf64) {
  check_gates<64>();
}

// Sticks that are used up soon, though some gates hold back what keys would take.
TEST(EmulatedSinglePass, GatesAndSticksThatEndSoon) {
  SinglePass x({1500, 40}, 64);
  x.give_gates();
  x.multiply_queries(48.0f);
  const test::oracle::Result want = x.want();
  for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
    ASSERT_NO_THROW((x.run<64>(timing, 0x1p-14f)));
    x.check(want);
  }
}

// Packs that end one token before, at and after the edges of tiles and of blocks of keys.
TEST(EmulatedSinglePass, EveryEdge) {
  for (const int32_t tokens : {128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385}) {
    for (const bool current : {false, true}) {
      for (const bool gated : {false, true}) {
        SinglePass x({tokens}, 64);
        if (current) x.attend_current();
        if (gated) x.give_gates();
        SCOPED_TRACE(tokens);
        ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
        x.check(x.want());
      }
    }
  }
}

TEST(EmulatedSinglePass, EmptyDocuments) {
  SinglePass x({70, 192, 130}, 64);
  const test::oracle::Result want = x.want();
  x.add_empty_documents();
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0x1p-24f)));
  x.expect_near(want);
}

// Every stick is used up within its tile's own block of keys, or a little further left: most blocks
// of keys are not seen by most tiles, and tiles far apart see the same block.
TEST(EmulatedSinglePass, SticksThatEndSoon) {
  SinglePass x({3000, 40}, 64);
  x.multiply_queries(48.0f);
  const test::oracle::Result want = x.want();
  for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
    ASSERT_NO_THROW((x.run<64>(timing, 0x1p-14f)));
    x.expect_near(want);
  }
}

// Heads of queries with gates that share keys and values; one group at a time gives the same bits.
template <int kD>
void check_gates_of_groups() {
  for (const Heads& heads : kGroups) {
    SinglePass x(kPacks[2], kD, heads);
    x.give_gates();
    x.give_remainder_to(StickRemainder::kValue);
    const test::oracle::Result want = x.want();
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      SCOPED_TRACE(describe_case(kPacks[2], timing) + ", groups of " + std::to_string(x.group));
      ASSERT_NO_THROW((x.run<kD>(timing, 0x1p-24f)));
      x.check(want);
    }
    const auto dk = to_f64(x.dk), dv = to_f64(x.dv), dgate = to_f64(x.dgate());
    x.compute_heads_at_a_time(x.group);
    ASSERT_NO_THROW((x.run<kD>(Timing::kAtOnce, 0x1p-24f)));
    EXPECT_EQ(to_f64(x.dk), dk);
    EXPECT_EQ(to_f64(x.dv), dv);
    EXPECT_EQ(to_f64(x.dgate()), dgate);
  }
}
TEST(EmulatedSinglePass, GatesOfGroups) {
  check_gates_of_groups<32>();
  check_gates_of_groups<64>();
}

void check_heads_in_groups(bool gated) {
  SinglePass x(kPacks[2], 64);
  if (gated) x.give_gates();
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
  const auto dgate = to_f64(x.dgate());
  const auto dq = to_f64(x.dq), dk = to_f64(x.dk), dv = to_f64(x.dv);
  x.compute_heads_at_a_time(1);
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
  EXPECT_EQ(to_f64(x.dq), dq);
  EXPECT_EQ(to_f64(x.dk), dk);
  EXPECT_EQ(to_f64(x.dv), dv);
  EXPECT_EQ(to_f64(x.dgate()), dgate);
}
TEST(EmulatedSinglePass, HeadsInGroups) {
  check_heads_in_groups(false);
}
TEST(EmulatedSinglePass, GatesOfHeadsInGroups) {
  check_heads_in_groups(true);
}

// Some logits are above 100 nats, so that no product of 1 + e is finite unless e is clamped.
TEST(EmulatedSinglePass, LargeLogits) {
  for (const bool gated : {false, true}) {
    SinglePass x({70, 122}, 64);
    if (gated) x.give_gates();
    x.multiply_queries(64.0f);
    ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
    x.check(x.want());
  }
}
// An e that is infinite stands beside one that is zero, so that their product is not a number.
TEST(EmulatedSinglePass, ExtremeLogits) {
  for (const bool gated : {false, true}) {
    SinglePass x({70, 122}, 64);
    if (gated) x.give_gates();
    x.multiply_queries(4096.0f);
    ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce)));
    for (const std::vector<bf16>* values :
         std::initializer_list<const std::vector<bf16>*>{&x.dq, &x.dk, &x.dv, &x.dgate()}) {
      for (const bf16 value : *values) ASSERT_TRUE(std::isfinite(__bfloat162float(value)));
    }
  }
}

}  // namespace
}  // namespace sbtrain::emulation
