// The Hopper kernels of softmax attention, plain and with ALiBi and FIRE, emulated (emulator.h),
// against the fp64 oracle.
#include "emulation/attention.cuh"
#include "kernels/attention/fire_parameters.cuh"
#include "kernels/attention/mainloop_softmax_forward_hopper.cuh"
#include "kernels/attention/mainloop_softmax_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_softmax_query_gradient_hopper.cuh"
#include "kernels/attention/score_alibi.cuh"

namespace sbtrain::emulation {
namespace {

using namespace kernels;  // what runs is theirs

class Softmax : public Attention {
 public:
  Softmax(const std::vector<int32_t>& documents, int head_dim, int window, Heads heads_ = {})
      : Attention(documents, head_dim, heads_), delta_(row.size()) {
    describe(problem_);
    problem_.window = window;
    problem_.max_seqlen = *std::max_element(documents.begin(), documents.end());
    problem_.lse = row.data();
  }

  template <int kD, typename Policy>
  void run(Timing timing, Policy policy) {
    clear_results();
    std::fill(delta_.begin(), delta_.end(), NAN);
    const SoftmaxProblem& p = problem_;
    policy.scale_log2 = scale * kLog2e;
    HopperSoftmaxArguments<Policy> x{.p = p,
                                     .policy = policy,
                                     .delta_HT = delta_.data(),
                                     .scheduler = {},
                                     .q{},
                                     .k{},
                                     .v{},
                                     .dout{}};
    forward<HopperSoftmaxForwardShape<kD, Policy>>(timing, x);
    launch({static_cast<unsigned>(ceil_div(p.tokens, kDeltaThreads * 8 / kD)), unsigned(heads)},
           {kDeltaThreads}, timing, [&] { softmax_delta_kernel<kD>(p, delta_.data()); });
    query_gradient<HopperSoftmaxQueryShape<kD, Policy>>(timing, x);
    key_gradient<HopperSoftmaxKeyShape<kD, Policy>>(timing, x);
  }
  const SoftmaxProblem& problem() const { return problem_; }

  test::oracle::Problem oracle() const {
    test::oracle::Problem p = Attention::oracle();
    p.window = problem_.window;
    return p;
  }
  void check(const test::oracle::Result& want) const {
    expect_near(want);
    EXPECT_LE(test::relative_error(to_f64(row), want.row), kRowError);
  }

 private:
  template <typename Shape, typename Policy>
  void forward(Timing timing, HopperSoftmaxArguments<Policy> x) {
    const SoftmaxProblem& p = problem_;
    x.q = token_tiles(p, p.q, Shape::kQueries);
    x.k = token_tiles(p, p.k, Shape::kKeys, group);
    x.v = token_tiles(p, p.v, Shape::kKeys, group);
    run_persistent<SoftmaxForwardMainloop<Shape, Policy>>(timing, x);
  }
  template <typename Shape, typename Policy>
  void query_gradient(Timing timing, HopperSoftmaxArguments<Policy> x) {
    const SoftmaxProblem& p = problem_;
    x.q = token_tiles(p, p.q, Shape::kQueries);
    x.k = token_tiles(p, p.k, Shape::kKeys, group);
    x.v = token_tiles(p, p.v, Shape::kKeys, group);
    x.dout = token_tiles(p, p.dout, Shape::kQueries);
    run_persistent<SoftmaxQueryGradientMainloop<Shape, Policy>>(timing, x);
  }
  template <typename Shape, typename Policy>
  void key_gradient(Timing timing, HopperSoftmaxArguments<Policy> x) {
    const SoftmaxProblem& p = problem_;
    x.q = token_tiles(p, p.q, Shape::kQueries);
    x.k = token_tiles(p, p.k, Shape::kRows, group);
    x.v = token_tiles(p, p.v, Shape::kRows, group);
    x.dout = token_tiles(p, p.dout, Shape::kQueries);
    run_persistent<SoftmaxKeyGradientMainloop<Shape, Policy>>(timing, x, tokens(), heads / group);
  }

  SoftmaxProblem problem_;
  std::vector<float> delta_;
};

// The parameters of FIRE, the tables made of them and the gradients. The kernels around the main
// loops run as launch_fire.cuh launches them.
class Fire {
 public:
  // Where kinds of parameters begin: c and m come first, w2 and b2 last.
  static constexpr int kW1 = 2, kB1 = kW1 + kFireUnits, kW2 = kB1 + kFireUnits;
  static int b2(int heads) { return kW2 + heads * kFireUnits; }
  static std::vector<bf16> random_numbers(int heads) {
    std::vector<bf16> x = random_bf16("fire", b2(heads) + heads, 0.6);
    x[0] = bf16(0.1f);
    x[1] = bf16(0.25f);
    return x;
  }
  Fire(const SoftmaxProblem& p, Timing timing)
      : p_(p),
        timing_(timing),
        numbers_(random_numbers(p.heads)),
        gradients_(numbers_.size()),
        at_(fire_scratch(p.tokens, p.heads, p.head_dim, p.max_seqlen, true)),
        scratch_(at_.bytes, std::byte{0xff}) {}

  FireScore prepare() {
    const FireTables tables{.distances = part<FireDistance>(at_.distances),
                            .r_T = part<float>(at_.r),
                            .queries_T = part<FireQuery>(at_.queries),
                            .breaks_K = part<float>(at_.breaks),
                            .lines_HS = part<float2>(at_.lines),
                            .bends_HK = part<float>(at_.bends)};
    const int64_t work = p_.tokens + 2 * kFireMargin;
    launch({blocks(work, 128)}, {128}, timing_,
           [&] { fire_positions_kernel(p_, parameters(), tables); });
    launch({unsigned(p_.heads)}, {2 * kFireUnits}, timing_,
           [&] { fire_network_kernel(parameters(), tables); });
    return {p_.scale * kLog2e, tables, part<float>(at_.partials), key_blocks()};
  }
  // Of all parameters, in the oracle's order.
  std::vector<double> gradients() {
    float* const g = gradients_.data();
    const FireGradients dx{g, g + 1, g + kW1, g + kB1, g + kW2};
    auto* const units = part<double>(at_.units);
    auto* const heads = part<double>(at_.heads);
    launch({unsigned(p_.heads)}, {kFireSums, kFireSumParts}, timing_, [&] {
      fire_heads_kernel(parameters(), dx, part<float>(at_.partials), key_blocks(), units, heads);
    });
    launch({}, {kFireUnits}, timing_,
           [&] { fire_parameters_kernel(parameters(), dx, p_.heads, units, heads); });
    return to_f64(gradients_);
  }

 private:
  FireParameters parameters() const {
    const bf16* const x = numbers_.data();
    return {x, x + 1, x + kW1, x + kB1, x + kW2, x + b2(p_.heads)};
  }
  int key_blocks() const {
    return static_cast<int>(ceil_div(p_.tokens, fire_block_keys(p_.head_dim)));
  }
  template <typename T>
  T* part(size_t offset) {
    return reinterpret_cast<T*>(scratch_.data() + offset);
  }

  const SoftmaxProblem& p_;
  const Timing timing_;
  const std::vector<bf16> numbers_;
  std::vector<float> gradients_;
  const FireScratch at_;
  std::vector<std::byte> scratch_;
};

// Runs a test with and without a window. adapt(problem) gives the oracle what belongs to the score;
// run(softmax, timing, want) computes the passes and checks what belongs to it.
template <int kD, typename Adapt, typename Run>
void check_case(const std::vector<int32_t>& documents, int window, Heads heads, const Adapt& adapt,
                const Run& run) {
  Softmax x(documents, kD, window, heads);
  test::oracle::Problem p = x.oracle();
  adapt(p);
  const test::oracle::Result want = test::oracle::softmax(p);
  for (const Timing timing : {Timing::kAtOnce, Timing::kLate}) {
    SCOPED_TRACE(describe_case(documents, timing) + ", window " + std::to_string(window) +
                 ", groups of " + std::to_string(heads.group));
    ASSERT_NO_THROW(run(x, timing, want));
    x.check(want);
  }
}
template <int kD, typename Adapt, typename Run>
void check_all(const Adapt& adapt, const Run& run) {
  for (const int window : {0, 65}) {
    for (const auto& documents : kPacks) check_case<kD>(documents, window, {}, adapt, run);
  }
}

// With heads that share keys, too: of scores that depend on the head they go to other kernels.
template <int kD>
void check_plain() {
  const auto adapt = [](auto&) {};
  const auto run = [](Softmax& x, Timing timing, const auto&) { x.run<kD>(timing, ScaledScore{}); };
  check_all<kD>(adapt, run);
  for (const Heads& heads : kGroups) check_case<kD>(kPacks[2], 0, heads, adapt, run);
}

template <int kD>
void check_alibi() {
  const std::vector<float> slopes = {0.05f, 0.01f, 0.1f, 0.02f};
  AlibiScore score{};
  for (size_t h = 0; h < slopes.size(); ++h) score.slopes_log2.of_head[h] = slopes[h] * kLog2e;
  check_all<kD>([&](auto& p) { p.slopes = to_f64(slopes); },
                [&](Softmax& x, Timing timing, const auto&) { x.run<kD>(timing, score); });
}

// The same bounds as on a GPU: relative to the gradient of the kind of parameter, or to a small
// part of the whole gradient where that is larger. The kernels leave that of b2, which is zero, as
// it was.
void expect_fire_close(const std::vector<double>& got, const std::vector<double>& want, int heads) {
  const auto norm = [](const std::vector<double>& x, size_t begin, size_t end) {
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += x[i] * x[i];
    return std::sqrt(sum);
  };
  std::vector<double> error(got.size());
  for (size_t i = 0; i < error.size(); ++i) error[i] = got[i] - want[i];
  const double whole = norm(want, 0, want.size());
  const size_t ends[] = {
      0, 1, Fire::kW1, Fire::kB1, Fire::kW2, static_cast<size_t>(Fire::b2(heads)), want.size()};
  for (size_t i = 0; i + 1 < std::size(ends); ++i) {
    const double size = norm(want, ends[i], ends[i + 1]);
    EXPECT_LE(norm(error, ends[i], ends[i + 1]), 1e-3 * std::max({size, 0.01 * whole, 1e-3}))
        << "parameters from " << ends[i] << " on";
  }
}

template <int kD>
void check_fire() {
  check_all<kD>([](auto& p) { p.fire = to_f64(Fire::random_numbers(static_cast<int>(p.heads))); },
                [](Softmax& x, Timing timing, const auto& want) {
                  Fire fire(x.problem(), timing);
                  x.run<kD>(timing, fire.prepare());
                  expect_fire_close(fire.gradients(), want.dfire, x.heads);
                });
}

TEST(EmulatedSoftmax, HeadsOf32) {
  check_plain<32>();
}
TEST(EmulatedSoftmax, HeadsOf64) {
  check_plain<64>();
}
TEST(EmulatedSoftmax, HeadsOf128) {
  check_plain<128>();
}
TEST(EmulatedSoftmax, AlibiOfHeadsOf64) {
  check_alibi<64>();
}
TEST(EmulatedSoftmax, AlibiOfHeadsOf128) {
  check_alibi<128>();
}
TEST(EmulatedSoftmax, FireOfHeadsOf64) {
  check_fire<64>();
}
TEST(EmulatedSoftmax, FireOfHeadsOf128) {
  check_fire<128>();
}

}  // namespace
}  // namespace sbtrain::emulation
