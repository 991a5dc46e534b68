// The backward pass of stick-breaking attention in a single pass, emulated (emulator.h), against
// the fp64 oracle.
#include "emulation/attention.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"
#include "kernels/attention/single_pass_scratch_hopper.cuh"

namespace sbtrain::emulation {
namespace {

using namespace kernels;  // what runs is theirs

class SinglePass : public Attention {
 public:
  SinglePass(const std::vector<int32_t>& documents, int head_dim)
      : Attention(documents, head_dim), stop_(row.size()) {
    describe(problem_);
    problem_.log2_rem = row.data();
    problem_.stop = stop_.data();
    problem_.query_factor = scale * kLog2e;
    problem_.scale = kFoldedScale;
  }
  // Multiplies the queries by scale * log2(e) before they are rounded; returns that factor.
  float fold_scale(float size = 1.0f) {
    const test::Owned exact = test::random_normal("q", {static_cast<int64_t>(q.size())});
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = __float2bfloat16(problem_.query_factor * size * exact.f32()[i]);
    }
    return problem_.query_factor;
  }

  template <int kD, int kOptions>
  void run(Timing timing) {
    using Shape = SinglePassShape<kD, kOptions>;
    static_assert(kSharedBytes<SinglePassShared<Shape>> <= kMaxSharedBytes);
    clear_results();
    std::fill(stop_.begin(), stop_.end(), INT32_MIN);
    forward<Folded<HopperForwardShape<kD, false, false>>>(timing);
    scratch_.assign(single_pass_scratch(tokens(), kHeads, kD).bytes / sizeof(float), NAN);
    const SinglePassArguments x = single_pass_arguments<Shape>(problem_, scratch_.data());
    const Index all_tiles = {static_cast<unsigned>(x.tiles), kHeads};
    launch(all_tiles, {64}, timing, [&] { begin_single_pass_kernel(x, Shape::kKeys); });
    std::fill_n(x.dq, x.tile(kHeads, 0) * 64 * kD, 0.0f);
    launch({}, {Shape::kThreads}, timing, [&] { single_pass_kernel<Shape>(x); });
    launch(all_tiles, {128}, timing, [&] { end_single_pass_kernel<kD>(x); });
  }

 private:
  template <typename Shape>
  void forward(Timing timing) {
    const StickBreakingProblem& p = problem_;
    const HopperForwardArguments x{.p = p,
                                   .scheduler = {},
                                   .q = token_tiles(p, p.q, Shape::kQueries),
                                   .k = key_tiles(p, p.k, Shape::kKeys),
                                   .v = key_tiles(p, p.v, Shape::kKeys)};
    run_persistent<StickForwardMainloop<Shape>>(timing, x);
  }

  std::vector<int32_t> stop_;
  std::vector<float> scratch_;
  StickBreakingProblem problem_;
};

template <int kD, int kOptions>
void check_all() {
  std::vector<std::vector<int32_t>> packs = kPacks;
  packs.push_back({900});
  for (const std::vector<int32_t>& documents : packs) {
    SinglePass x(documents, kD);
    const float factor = x.fold_scale();
    test::oracle::Problem problem = x.oracle();
    problem.scale = std::log(2.0);
    test::oracle::Result want = test::oracle::stickbreaking(problem);
    for (double& dq : want.dq) dq *= double(factor);
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      SCOPED_TRACE(describe_case(documents, timing));
      ASSERT_NO_THROW((x.run<kD, kOptions>(timing)));
      x.expect_near(want);
    }
  }
}

using Options = SinglePassOptions;
constexpr int kAll = Options::kQueryGradient | Options::kSplitScores;
TEST(EmulatedSinglePass, HeadsOf64) {
  check_all<64, kAll>();
}
TEST(EmulatedSinglePass, EarlyValues) {
  check_all<64, kAll | Options::kEarlyValues | Options::kScoresFirst>();
}
TEST(EmulatedSinglePass, Clamped) {
  check_all<64, kAll | Options::kClamped | Options::kEarlyValues | Options::kScoresFirst>();
}
TEST(EmulatedSinglePass, RelaxedBarriers) {
  check_all<64, kAll | Options::kRelaxed | Options::kScoresFirst>();
}

// A third of the queries has logits of which some are above 100 nats.
TEST(EmulatedSinglePass, LargeLogits) {
  SinglePass x({70, 122}, 64);
  const float factor = x.fold_scale();
  for (size_t i = 0; i < x.q.size(); ++i) {
    const int token = static_cast<int>(i) / (Attention::kHeads * 64);
    if (token % 3 == 0) x.q[i] = __float2bfloat16(64.0f * __bfloat162float(x.q[i]));
  }
  test::oracle::Problem problem = x.oracle();
  problem.scale = std::log(2.0);
  test::oracle::Result want = test::oracle::stickbreaking(problem);
  for (double& dq : want.dq) dq *= double(factor);
  ASSERT_NO_THROW((x.run<64, kAll>(Timing::kAtOnce)));
  x.expect_near(want);
  ASSERT_NO_THROW((x.run<64, kAll | Options::kClamped>(Timing::kAtOnce)));
  x.expect_near(want);
}

}  // namespace
}  // namespace sbtrain::emulation
