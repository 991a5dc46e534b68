// The Hopper kernels of softmax attention to the keys of another rank, emulated (emulator.h),
// against the fp64 oracle.
#include "emulation/attention.cuh"
#include "kernels/attention/mainloop_softmax_forward_hopper.cuh"
#include "kernels/attention/mainloop_softmax_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_softmax_query_gradient_hopper.cuh"
#include "kernels/attention/score_alibi.cuh"

namespace sbtrain::emulation {
namespace {

using namespace kernels;  // what runs is theirs

// Tokens of a rank, how many of them see keys, how many keys, and a window, or 0.
struct FarSoftmaxCase {
  int tokens, queries, keys, window;
};
constexpr FarSoftmaxCase kFarSoftmaxCases[] = {
    {256, 256, 256, 0}, {200, 200, 129, 0}, {300, 130, 300, 0},  {192, 1, 192, 0},
    {320, 320, 1, 0},   {449, 70, 40, 0},   {256, 256, 256, 65}, {300, 300, 290, 400}};

class FarSoftmax : public Attention {
 public:
  FarSoftmax(const FarSoftmaxCase& c, int head_dim, Heads heads_ = {})
      : Attention({c.tokens}, head_dim, heads_), delta_(row.size()) {
    describe(problem_);
    problem_.lse = row.data();
    problem_.window = c.window;
    problem_.queries = c.queries;
    problem_.first_key = c.tokens - c.keys;
    problem_.distance = c.tokens;
    const test::Owned o_near = test::random_normal("o", {static_cast<int64_t>(q.size())});
    const test::Owned lse_near =
        test::random_normal("lse", {static_cast<int64_t>(row.size())}, 1.0, 4.0);
    given_o_.assign(o_near.f32(), o_near.f32() + q.size());
    given_lse_.assign(lse_near.f32(), lse_near.f32() + row.size());
  }

  template <int kD, typename Score>
  void run(Timing timing, Score score) {
    using Policy = FarScore<Score>;
    score.scale_log2 = scale * kLog2e;
    clear_results();
    std::fill(delta_.begin(), delta_.end(), NAN);
    o_sum = given_o_;
    row = given_lse_;
    dq_sum.assign(q.size(), kBefore);
    for (auto* x : {&dk_sum, &dv_sum}) x->assign(k.size(), kBefore);
    SoftmaxFarProblem& p = problem_;
    const int64_t width = int64_t{heads} * head_dim;
    p.lse = row.data();
    p.o_sum = {o_sum.data(), width};
    p.dq_sum = {dq_sum.data(), width};
    p.dk_sum = {dk_sum.data(), width / group};
    p.dv_sum = {dv_sum.data(), width / group};
    HopperSoftmaxArguments<Policy> x{.p = p,
                                     .policy = {score},
                                     .delta_HT = delta_.data(),
                                     .scheduler = {},
                                     .q{},
                                     .k{},
                                     .v{},
                                     .dout{}};
    using Forward = HopperSoftmaxForwardShape<kD, Policy>;
    x.q = token_tiles(p, p.q, Forward::kQueries);
    x.k = token_tiles(p, p.k, Forward::kKeys, group);
    x.v = token_tiles(p, p.v, Forward::kKeys, group);
    run_persistent<SoftmaxForwardMainloop<Forward, Policy>>(timing, x, p.queries, heads);
    for (size_t i = 0; i < o.size(); ++i) o[i] = __float2bfloat16(o_sum[i]);
    launch({static_cast<unsigned>(ceil_div(p.tokens, kDeltaThreads * 8 / kD)), unsigned(heads)},
           {kDeltaThreads}, timing, [&] { softmax_delta_kernel<kD>(p, delta_.data()); });
    using Query = HopperSoftmaxQueryShape<kD, Policy>;
    x.q = token_tiles(p, p.q, Query::kQueries);
    x.dout = token_tiles(p, p.dout, Query::kQueries);
    x.k = token_tiles(p, p.k, Query::kKeys, group);
    x.v = token_tiles(p, p.v, Query::kKeys, group);
    run_persistent<SoftmaxQueryGradientMainloop<Query, Policy>>(timing, x, p.queries, heads);
    using Key = HopperSoftmaxKeyShape<kD, Policy>;
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    x.k = token_tiles(p, p.k, Key::kRows, group);
    x.v = token_tiles(p, p.v, Key::kRows, group);
    const int keys = p.tokens - p.first_key / Key::kKeys * Key::kKeys;
    run_persistent<SoftmaxKeyGradientMainloop<Key, Policy>>(timing, x, keys, heads / group);
  }
  void check(const std::vector<double>& slopes) const {
    test::oracle::Problem p = oracle();
    p.window = problem_.window;
    p.slopes = slopes;
    const test::oracle::FarKeys far{
        .queries = problem_.queries, .keys = tokens() - problem_.first_key, .before = {}, .w = {}};
    std::vector<double> wanted_o = to_f64(given_o_), wanted_lse = to_f64(given_lse_);
    const test::oracle::Result want =
        test::oracle::far_softmax(p, far, problem_.distance, wanted_o, wanted_lse);
    EXPECT_LE(test::relative_error(to_f64(o_sum), wanted_o), kOutputError);
    EXPECT_LE(test::relative_error(to_f64(row), wanted_lse), kRowError);
    EXPECT_LE(test::relative_error(added(dq_sum), want.dq), kGradientError);
    EXPECT_LE(test::relative_error(added(dk_sum), want.dk), kGradientError);
    EXPECT_LE(test::relative_error(added(dv_sum), want.dv), kGradientError);
  }

  std::vector<float> o_sum, dq_sum, dk_sum, dv_sum;

 private:
  static constexpr float kBefore = 0.25f;  // what sums begin with
  static std::vector<double> added(const std::vector<float>& sums) {
    std::vector<double> x = to_f64(sums);
    for (double& value : x) value -= double(kBefore);
    return x;
  }
  SoftmaxFarProblem problem_;
  std::vector<float> delta_, given_o_, given_lse_;
};

template <int kD, typename Score>
void check_far(const Score& score, const std::vector<double>& slopes, Heads heads = {}) {
  for (const FarSoftmaxCase& c : kFarSoftmaxCases) {
    FarSoftmax x(c, kD, heads);
    for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
      SCOPED_TRACE(std::to_string(c.queries) + " of " + std::to_string(c.tokens) + " see " +
                   std::to_string(c.keys) + ", window " + std::to_string(c.window));
      ASSERT_NO_THROW(x.run<kD>(timing, score));
      x.check(slopes);
    }
  }
}
TEST(EmulatedFarSoftmax, HeadsOf32) {
  check_far<32>(ScaledScore{}, {});
}
TEST(EmulatedFarSoftmax, HeadsOf64) {
  check_far<64>(ScaledScore{}, {});
}
TEST(EmulatedFarSoftmax, HeadsOf128) {
  check_far<128>(ScaledScore{}, {});
}
TEST(EmulatedFarSoftmax, GroupsOfHeads) {
  for (const Heads& heads : kGroups) check_far<64>(ScaledScore{}, {}, heads);
}
TEST(EmulatedFarSoftmax, Alibi) {
  const std::vector<float> slopes = {0.05f, 0.01f};
  AlibiScore score{};
  for (size_t h = 0; h < slopes.size(); ++h) score.slopes_log2.of_head[h] = slopes[h] * kLog2e;
  check_far<64>(score, to_f64(slopes));
  check_far<128>(score, to_f64(slopes));
}

}  // namespace
}  // namespace sbtrain::emulation
