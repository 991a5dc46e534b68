// What receives the remainder after the keys of all ranks, emulated (emulator.h), against sums in
// fp64.
#include "emulation/attention.cuh"
#include "kernels/attention/stickbreaking_remainder.cu"

namespace sbtrain::emulation {
namespace {

constexpr float kSumBefore = 0.25f;

// [T, H, d] as in Attention; log2_rem is its `row`.
class Remainder : public Attention {
 public:
  Remainder(int tokens, int head_dim, Heads heads_, kernels::StickRemainder to)
      : Attention({tokens}, head_dim, heads_), bias_(random_bf16("r", int64_t{heads} * head_dim)) {
    describe(problem_);
    problem_.remainder = to;
    const test::Owned left = test::random_normal("left", {static_cast<int64_t>(row.size())}, 3);
    for (size_t i = 0; i < row.size(); ++i) row[i] = -std::abs(left.f32()[i]);
    problem_.log2_rem = row.data();
    if (to_vector()) problem_.remainder_bias = bias_.data();
  }
  void check() {
    const int64_t width = int64_t{heads} * head_dim;
    std::vector<float> o_sum(q.size(), kSumBefore), w(row.size(), NAN);
    std::vector<float> given(to_vector() ? bias_.size() : v.size(), kSumBefore);
    std::vector<float> parts(static_cast<size_t>(kernels::kTokenParts * width), NAN);
    problem_.far.o = {o_sum.data(), width};
    problem_.far.w = w.data();
    problem_.far.dv = {given.data(), width / group};
    problem_.dremainder_bias = given.data();
    problem_.workspace = parts.data();
    kernels::stickbreaking_add_remainder(nullptr, problem_);
    kernels::stickbreaking_remainder_gradient(nullptr, problem_);
    to_vector() ? kernels::stickbreaking_remainder_vector(nullptr, problem_)
                : kernels::stickbreaking_remainder_values(nullptr, problem_);

    const std::vector<double> receiver = to_f64(to_vector() ? bias_ : v), gradient = to_f64(dout);
    std::vector<double> want_o(o_sum.size(), double{kSumBefore}), want_w(w.size());
    std::vector<double> want_given(given.size(), double{kSumBefore});
    for (int64_t j = 0; j < tokens(); ++j) {
      for (int64_t h = 0; h < heads; ++h) {
        const double left = std::exp2(double(row[h * tokens() + j]));
        for (int64_t c = 0; c < head_dim; ++c) {
          const int64_t at = j * width + h * head_dim + c;
          const int64_t to =
              to_vector() ? h * head_dim + c : j * (width / group) + h / group * head_dim + c;
          want_o[at] += left * receiver[to];
          want_w[h * tokens() + j] += gradient[at] * receiver[to];
          want_given[to] += left * gradient[at];
        }
      }
    }
    EXPECT_LE(test::relative_error(to_f64(o_sum), want_o), kRowError);
    EXPECT_LE(test::relative_error(to_f64(w), want_w), kRowError);
    EXPECT_LE(test::relative_error(to_f64(given), want_given), kRowError);
  }

 private:
  bool to_vector() const { return problem_.remainder == kernels::StickRemainder::kBias; }
  std::vector<bf16> bias_;
  kernels::StickBreakingProblem problem_;
};

TEST(EmulatedRemainder, IsGivenToValues) {
  for (const int head_dim : {24, 64, 200}) {
    SCOPED_TRACE(head_dim);
    Remainder(77, head_dim, {}, kernels::StickRemainder::kValue).check();
    for (const Heads& heads : kGroups) {
      Remainder(33, head_dim, heads, kernels::StickRemainder::kValue).check();
    }
  }
}
TEST(EmulatedRemainder, IsGivenToVectors) {
  for (const int head_dim : {24, 64, 200}) {
    SCOPED_TRACE(head_dim);
    Remainder(77, head_dim, {3, 1}, kernels::StickRemainder::kBias).check();
  }
}

}  // namespace
}  // namespace sbtrain::emulation
