// The kernels of stick-breaking attention to the keys of another rank, emulated (emulator.h),
// against the fp64 oracle: those for Hopper, and the portable ones with and without gates.
#include <cstring>

#include "emulation/attention.cuh"
#include "kernels/attention/far_hopper.cuh"
#include "kernels/attention/far_queries.h"
#include "kernels/attention/mainloop_stickbreaking_backward.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_query_gradient_hopper.cuh"
#include "kernels/attention/single_pass_arguments_hopper.cuh"
#include "kernels/attention/single_pass_ends_hopper.cuh"

namespace sbtrain::emulation {
namespace {

using namespace kernels;  // what runs is theirs

// Tokens of a rank, how many of them see keys, and how many keys.
struct FarCase {
  int tokens, queries, keys;
};
constexpr FarCase kFarCases[] = {{256, 256, 256}, {200, 200, 129}, {300, 130, 300},
                                 {192, 1, 192},   {320, 320, 1},   {449, 70, 40}};

constexpr float kBefore = 0.25f;  // what sums begin with

class FarStickBreaking : public Attention {
 public:
  FarStickBreaking(const FarCase& c, int head_dim, Heads heads_ = {})
      : Attention({c.tokens}, head_dim, heads_), stop_(row.size()) {
    describe(problem_);
    const auto rows = static_cast<int64_t>(row.size());
    const test::Owned left = test::random_normal("before", {rows}, 3);
    const test::Owned w = test::random_normal("w", {rows});
    for (int64_t i = 0; i < rows; ++i) {
      // Of a tile of 64 rows nothing is left that counts.
      const bool used_up = i % c.tokens / 64 == 1;
      before_.push_back(used_up ? -60.0f : -std::abs(left.f32()[i]));
      given_w_.push_back(w.f32()[i]);
    }
    problem_.log2_rem = row.data();
    problem_.stop = stop_.data();
    problem_.far = {.queries = c.queries, .key = c.tokens - c.keys, .before = before_.data()};
    compute_at_a_time(c.tokens);
  }
  void use_up_all() { std::fill(before_.begin(), before_.end(), -60.0f); }
  void add_gates() {
    gate_ = random_gates(row.size());
    problem_.gate = gate_.data();
    problem_.gate_stride = heads;
  }
  // So many queries at a time in the backward pass.
  void compute_at_a_time(int queries, bool hopper = true) {
    const StickFarScratch s = stickbreaking_far_layout(hopper, tokens(), heads, queries);
    workspace_.resize(s.bytes / sizeof(float));
    problem_.workspace = workspace_.data();
    problem_.workspace_heads = heads;
    problem_.workspace_blocks = static_cast<int>(s.blocks);
    problem_.workspace_tokens = queries;
  }

  // The backward pass in a single pass, of so many heads at a time, in place of two phases.
  void take_single_pass(int at_a_time) {
    single_pass_ = true;
    workspace_.resize(stickbreaking_single_pass_layout(tokens(), at_a_time, head_dim, false).bytes /
                      sizeof(float));
    problem_.workspace = workspace_.data();
    problem_.workspace_heads = at_a_time;
  }

  template <int kD>
  void run(Timing timing, float skip_epsilon) {
    const StickBreakingProblem& p = begin(skip_epsilon);
    using Forward = Far<HopperForwardShape<kD, false>>;
    const HopperForwardArguments x{.p = p,
                                   .scheduler = {},
                                   .q = token_tiles(p, p.q, Forward::kQueries),
                                   .k = key_tiles(p, p.k, Forward::kKeys),
                                   .v = key_tiles(p, p.v, Forward::kKeys)};
    run_persistent<StickForwardMainloop<Forward>>(timing, x, p.far.queries, heads);
    if constexpr (kD <= 64) {
      if (single_pass_) return single_pass<kD>(timing);
    }
    for_each_part_of_far_queries(p, [&](const StickBreakingProblem& part, int head, int count) {
      backward<Far<QueryGradientShape<kD>>, Far<KeyGradientShape<kD>>>(timing, part, head, count);
    });
  }
  // The portable kernels, of heads of up to 64 channels.
  template <int kD, bool kGated>
  void run_portable(Timing timing, float skip_epsilon) {
    const StickBreakingProblem& p = begin(skip_epsilon);
    using Forward = StickShape<kD, StickPass::kForward>;
    using Query = StickShape<kD, StickPass::kQuery>;
    launch(query_blocks(p.far.queries, Forward::kQueries, heads), {StickThreads::kThreads}, timing,
           [&] { stick_forward_kernel<kD, kGated, true>(p); });
    for_each_part_of_far_queries(p, [&](const StickBreakingProblem& part, int head, int count) {
      launch(query_blocks(part.far.queries - part.far.first_query, Query::kQueries, count),
             {StickThreads::kThreads}, timing,
             [&] { stick_query_gradient_kernel<kD, kGated, true>(part, head, head / group); });
      const int keys = tokens() - part.far.key / kStickKeys * kStickKeys;
      const Index blocks = {unsigned((keys + kStickKeys - 1) / kStickKeys),
                            unsigned(count / group)};
      launch(blocks, {StickThreads::kThreads}, timing, [&] {
        constexpr int kStages = 2;
        group > 1
            ? stick_key_gradient_kernel<kD, kGated, kStages, true, true>(part, head, count,
                                                                         head / group)
            : stick_key_gradient_kernel<kD, kGated, kStages, false, true>(part, head, count, head);
      });
    });
  }
  void check() const {
    test::oracle::FarKeys far{.queries = problem_.far.queries,
                              .keys = tokens() - problem_.far.key,
                              .before = to_f64(before_),
                              .w = to_f64(given_w_)};
    test::oracle::Problem problem = oracle();
    problem.gate = to_f64(gate_);
    const test::oracle::Result want = test::oracle::far_stickbreaking(problem, far);
    if (!gate_.empty()) {
      EXPECT_LE(test::relative_error(added(dgate_sum), want.dgate), kGradientError);
    }
    EXPECT_LE(test::relative_error(added(o_sum), want.o), kOutputError);
    EXPECT_LE(test::relative_error(added(dq_sum), want.dq), kGradientError);
    EXPECT_LE(test::relative_error(added(dk_sum), want.dk), kGradientError);
    EXPECT_LE(test::relative_error(added(dv_sum), want.dv), kGradientError);
    // Of what is 2^-60 of a stick, W is noise that nothing asks for.
    std::vector<double> ws, wanted_w;
    for (size_t i = 0; i < row.size(); ++i) {
      if (static_cast<int>(i) % tokens() >= far.queries) {
        EXPECT_TRUE(std::isnan(row[i])) << i;
        EXPECT_EQ(w[i], given_w_[i]) << i;
        continue;
      }
      EXPECT_NEAR(std::exp2(double(row[i])), want.row[i], 1e-7 + kOutputError * want.row[i]) << i;
      const double stick = std::exp2(double(before_[i]));
      ws.push_back(stick * w[i]);
      wanted_w.push_back(stick * far.w[i]);
    }
    EXPECT_LE(test::relative_error(ws, wanted_w), kGradientError);
  }
  std::vector<std::vector<float>> results() const {
    return {o_sum, dq_sum, dk_sum, dv_sum, w, row, dgate_sum};
  }
  int stop(int head, int query) const { return stop_[head * tokens() + query]; }

  std::vector<float> o_sum, dq_sum, dk_sum, dv_sum, dgate_sum, w;
  int blocks_taken = 0;  // of keys, by the single pass

 private:
  const StickBreakingProblem& begin(float skip_epsilon) {
    clear_results();
    blocks_taken = 0;
    std::fill(workspace_.begin(), workspace_.end(), NAN);
    for (auto* x : {&o_sum, &dq_sum}) x->assign(q.size(), kBefore);
    for (auto* x : {&dk_sum, &dv_sum}) x->assign(k.size(), kBefore);
    dgate_sum.assign(gate_.size(), kBefore);
    w = given_w_;
    StickBreakingProblem& p = problem_;
    p.skip_epsilon = skip_epsilon;
    const int64_t width = int64_t{heads} * head_dim;
    p.far.w = w.data();
    p.far.o = {o_sum.data(), width};
    p.far.dq = {dq_sum.data(), width};
    p.far.dk = {dk_sum.data(), width / group};
    p.far.dv = {dv_sum.data(), width / group};
    p.far.dgate = {dgate_sum.data(), heads};
    return p;
  }
  // As query_grid() of launch_attention.h.
  Index query_blocks(int queries, int of_a_block, int count) const {
    return {unsigned((queries + of_a_block - 1) / of_a_block), unsigned(group),
            unsigned(count / group)};
  }
  static std::vector<double> added(const std::vector<float>& sums) {
    std::vector<double> x = to_f64(sums);
    for (double& value : x) value -= double(kBefore);
    return x;
  }
  template <typename Query, typename Key>
  void backward(Timing timing, const StickBreakingProblem& p, int head, int count) {
    HopperBackwardArguments x{.p = p,
                              .gates = nullptr,
                              .part = {},
                              .scheduler = {},
                              .q = token_tiles(p, p.q, Query::kQueries),
                              .dout = token_tiles(p, p.dout, Query::kQueries),
                              .k = key_tiles(p, p.k, kStickKeys),
                              .v = key_tiles(p, p.v, kStickKeys)};
    place_in_far_scratch(x);
    x.first_head = head;
    run_persistent<StickQueryGradientMainloop<Query>>(timing, x, p.far.queries - p.far.first_query,
                                                      count);
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    run_persistent<StickKeyGradientMainloop<Key>>(timing, x, keys_of_far_tiles(p, Key::kKeys),
                                                  count / group);
  }
  template <int kD>
  void single_pass(Timing timing) {
    using Shape = Far<SinglePassShape<kD>>;
    for (int head = 0; head < heads; head += problem_.workspace_heads) {
      const SinglePassArguments x = single_pass_arguments<Shape>(problem_, head);
      const Index tiles = {static_cast<unsigned>(x.tiles), static_cast<unsigned>(x.heads)};
      std::memset(x.taken, kNothingSeen, sizeof(int));
      launch(tiles, {kSinglePassBeginThreads}, timing,
             [&] { begin_single_pass_kernel<true>(x, Shape::kKeys); });
      const int first = *x.taken;
      launch({}, {Shape::kThreads}, timing, [&] { single_pass_hopper_kernel<Shape>(x); });
      // The last one that is taken is none.
      blocks_taken += *x.taken - first - 1;
      launch(tiles, {kSinglePassEndThreads}, timing, [&] { end_far_single_pass_kernel<kD>(x); });
    }
  }

  bool single_pass_ = false;
  std::vector<int32_t> stop_;
  std::vector<float> before_, given_w_, gate_, workspace_;
  StickBreakingProblem problem_;
};

template <int kD>
void check_far(Heads heads = {}) {
  for (const FarCase& c : kFarCases) {
    FarStickBreaking x(c, kD, heads);
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
        SCOPED_TRACE(std::to_string(c.queries) + " of " + std::to_string(c.tokens) + " see " +
                     std::to_string(c.keys) + ", epsilon " + std::to_string(skip_epsilon));
        ASSERT_NO_THROW((x.run<kD>(timing, skip_epsilon)));
        x.check();
      }
    }
  }
}
TEST(EmulatedFarStickBreaking, HeadsOf32) {
  check_far<32>();
}
TEST(EmulatedFarStickBreaking, HeadsOf64) {
  check_far<64>();
}
TEST(EmulatedFarStickBreaking, HeadsOf128) {
  check_far<128>();
}
template <int kD>
void check_far_single_pass() {
  std::vector<FarCase> cases(std::begin(kFarCases), std::end(kFarCases));
  cases.push_back({900, 900, 700});
  for (const FarCase& c : cases) {
    FarStickBreaking x(c, kD);
    x.take_single_pass(x.heads);
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
        SCOPED_TRACE(std::to_string(c.queries) + " of " + std::to_string(c.tokens) + " see " +
                     std::to_string(c.keys) + ", epsilon " + std::to_string(skip_epsilon));
        ASSERT_NO_THROW((x.run<kD>(timing, skip_epsilon)));
        x.check();
      }
    }
    const auto sums = std::vector{x.dq_sum, x.dk_sum, x.dv_sum, x.w};
    x.take_single_pass(1);
    ASSERT_NO_THROW((x.run<kD>(Timing::kAtOnce, 0x1p-24f)));
    EXPECT_EQ((std::vector{x.dq_sum, x.dk_sum, x.dv_sum, x.w}), sums);
  }
}
TEST(EmulatedFarStickBreaking, SinglePassOfHeadsOf32) {
  check_far_single_pass<32>();
}
TEST(EmulatedFarStickBreaking, SinglePassOfHeadsOf64) {
  check_far_single_pass<64>();
}

TEST(EmulatedFarStickBreaking, GroupsOfHeads) {
  for (const Heads& heads : kGroups) check_far<64>(heads);
}

// Where the states of all queries do not fit, some are computed after the others. The sums of keys
// are then rounded in other places.
TEST(EmulatedFarStickBreaking, PartsOfQueries) {
  FarStickBreaking x({800, 790, 500}, 64);
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0x1p-24f)));
  x.check();
  const auto whole = x.results();
  x.compute_at_a_time(384);
  ASSERT_NO_THROW((x.run<64>(Timing::kLate, 0x1p-24f)));
  x.check();
  EXPECT_EQ(x.dq_sum, whole[1]);
  EXPECT_EQ(x.w, whole[4]);
}

template <int kD>
void check_portable(bool gated, Heads heads = {}) {
  for (const FarCase& c : kFarCases) {
    FarStickBreaking x(c, kD, heads);
    x.compute_at_a_time(c.tokens, /*hopper=*/false);
    if (gated) x.add_gates();
    for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
      SCOPED_TRACE(std::to_string(c.queries) + " of " + std::to_string(c.tokens) + " see " +
                   std::to_string(c.keys) + ", epsilon " + std::to_string(skip_epsilon));
      ASSERT_NO_THROW((gated ? x.run_portable<kD, true>(Timing::kAtOnce, skip_epsilon)
                             : x.run_portable<kD, false>(Timing::kAtOnce, skip_epsilon)));
      x.check();
    }
  }
}
TEST(EmulatedFarStickBreaking, PortableKernels) {
  check_portable<32>(/*gated=*/false);
  check_portable<64>(/*gated=*/false);
}
TEST(EmulatedFarStickBreaking, PortableKernelsWithGates) {
  check_portable<32>(/*gated=*/true);
  check_portable<64>(/*gated=*/true);
  for (const Heads& heads : kGroups) check_portable<64>(/*gated=*/true, heads);
}
// Some queries after the others add to the same gradients of gates.
TEST(EmulatedFarStickBreaking, PortablePartsOfQueriesWithGates) {
  FarStickBreaking x({800, 790, 500}, 64);
  x.add_gates();
  x.compute_at_a_time(800, /*hopper=*/false);
  ASSERT_NO_THROW((x.run_portable<64, true>(Timing::kAtOnce, 0x1p-24f)));
  x.check();
  const auto whole = x.results();
  x.compute_at_a_time(384, /*hopper=*/false);
  ASSERT_NO_THROW((x.run_portable<64, true>(Timing::kAtOnce, 0x1p-24f)));
  x.check();
  EXPECT_EQ(x.dq_sum, whole[1]);
  EXPECT_EQ(x.w, whole[4]);
}

// A tile to which nothing is left of its sticks counts no key as read, and changes no sum: the
// gradients of the last keys would have to go through all such tiles.
TEST(EmulatedFarStickBreaking, UsedUpSticksReadNothing) {
  FarStickBreaking x({512, 512, 512}, 64);
  x.use_up_all();
  for (const bool single_pass : {false, true}) {
    if (single_pass) x.take_single_pass(x.heads);
    ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0x1p-24f)));
    EXPECT_EQ(x.stop(0, 64), 512);
    for (const auto* sum : {&x.o_sum, &x.dq_sum, &x.dk_sum, &x.dv_sum}) {
      EXPECT_EQ(*sum, std::vector<float>(sum->size(), kBefore));
    }
  }
  EXPECT_EQ(x.blocks_taken, 0);
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0.0f)));
  EXPECT_EQ(x.stop(0, 64), 0);
  EXPECT_EQ(x.blocks_taken, 3 * x.heads);
}

// Of 700 keys the first queries read the last ones, and none the first ones.
TEST(EmulatedFarStickBreaking, PlacesBeforeTheFirstThatIsSeenAreNotTaken) {
  FarStickBreaking x({900, 900, 700}, 64);
  x.take_single_pass(x.heads);
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0.0f)));
  EXPECT_EQ(x.blocks_taken, 4 * x.heads);
  ASSERT_NO_THROW((x.run<64>(Timing::kAtOnce, 0x1p-24f)));
  EXPECT_GE(x.blocks_taken, x.heads);
  EXPECT_LT(x.blocks_taken, 4 * x.heads);
  x.check();
}

}  // namespace
}  // namespace sbtrain::emulation
