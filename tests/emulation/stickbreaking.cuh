// The Hopper kernels of stick-breaking attention, emulated (emulator.h). What runs heads of 32 and
// of 128 channels is compiled in files of its own: together with that of 64 it would take longer to
// compile than any other file.
#pragma once

#include "emulation/stickbreaking_forward.cuh"
#include "kernels/attention/mainloop_stickbreaking_key_gradient_hopper.cuh"
#include "kernels/attention/mainloop_stickbreaking_query_gradient_hopper.cuh"
#include "kernels/attention/segments_hopper.cuh"

namespace sbtrain::emulation {

using namespace kernels;  // what runs is theirs

class StickBreaking : public Attention {
 public:
  StickBreaking(const std::vector<int32_t>& documents, int head_dim, Heads heads_ = {})
      : Attention(documents, head_dim, heads_),
        stop_(row.size()),
        blocks_((*std::max_element(documents.begin(), documents.end()) + 126) / kStickKeys + 1) {
    describe(problem_);
    problem_.log2_rem = row.data();
    problem_.stop = stop_.data();
    take_workspace(heads, tokens());
  }

  // Computes one head at a time, and of it segments of so many tokens.
  void cut_into_segments(int segment) { take_workspace(1, segment); }

  // As fold_scale_into(); returns the factor of the queries.
  float fold_scale() {
    fold_scale_into(problem_);
    return problem_.query_factor;
  }
  void give_remainder_to_values() { problem_.remainder = StickRemainder::kValue; }
  void attend_current() { problem_.attend_current = true; }
  // The remainder has a gradient of its own, which is returned.
  std::vector<double> give_remainder_a_gradient() {
    const test::Owned x = test::random_normal("drem", {static_cast<int64_t>(row.size())});
    drem_.assign(x.f32(), x.f32() + row.size());
    problem_.drem = drem_.data();
    return to_f64(drem_);
  }
  // Returns the gates (random_gates).
  std::vector<double> give_gates() {
    gate_ = random_gates(row.size());
    problem_.gate = gate_.data();
    problem_.gate_stride = heads;
    problem_.dgate_stride = heads;
    take_workspace(heads, tokens());
    return to_f64(gate_);
  }
  const std::vector<bf16>& dgate() const { return dgate_; }
  void set_scale(float scale) {
    problem_.scale = scale;
    problem_ = with_scale_that_hides(problem_);  // as the launches do
  }

  template <int kD, bool kFewTiles, template <typename> class Kind = Unfolded>
  void run(Timing timing, float skip_epsilon);
  // What the kernels skip is less than the errors that are allowed.
  void check(const test::oracle::Result& want) const {
    expect_near(want);
    if (!gate_.empty()) {
      EXPECT_LE(test::relative_error(to_f64(dgate_), want.dgate), kGradientError);
    }
    std::vector<double> rem;
    for (const float log2_rem : row) rem.push_back(std::exp2(double(log2_rem)));
    EXPECT_LE(test::relative_error(rem, want.row), kOutputError);
  }

  // How long the schedulers of both phases take a tile for, in the order of its rows.
  template <typename Mainloop>
  std::vector<int> steps_of_tiles() const {
    std::vector<int> steps;
    const auto of_tile = kernels::steps_of<Mainloop>(backward_arguments());
    for (int tile = 0; tile * Mainloop::kTileRows < tokens(); ++tile)
      steps.push_back(of_tile(tile));
    return steps;
  }

 private:
  void take_workspace(int at_a_time, int segment) {
    const StickHopperScratch scratch = stickbreaking_hopper_layout({.tokens = tokens(),
                                                                    .heads = heads,
                                                                    .head_dim = head_dim,
                                                                    .blocks = blocks_,
                                                                    .group = group,
                                                                    .gated = !gate_.empty()},
                                                                   at_a_time, segment);
    workspace_.resize(scratch.bytes / sizeof(float));
    problem_.workspace = workspace_.data();
    problem_.workspace_heads = at_a_time;
    problem_.workspace_blocks = static_cast<int>(scratch.blocks);
    problem_.workspace_tokens = static_cast<int>(scratch.segment);
  }
  HopperBackwardArguments backward_arguments() const {
    HopperBackwardArguments x{.p = problem_,
                              .gates = nullptr,
                              .part = {},
                              .scheduler = {},
                              .q = {},
                              .dout = {},
                              .k = key_tiles(problem_, problem_.k, kStickKeys),
                              .v = key_tiles(problem_, problem_.v, kStickKeys)};
    place_in_scratch(x);
    return x;
  }
  template <int kD, bool kFewTiles, template <typename> class Kind>
  void backward(Timing timing) {
    const StickBreakingProblem& p = problem_;
    HopperBackwardArguments x = backward_arguments();
    if (!in_segments(p)) {
      prepare_gates(timing, x);
      run_query_gradient<Kind<QueryGradientShape<kD, kFewTiles>>>(timing, x, tokens());
      if (!by_member(p)) {
        return run_key_gradient<Kind<KeyGradientShape<kD, kFewTiles>>>(timing, x, tokens());
      }
      return for_each_member(
          x, heads,
          [&] {
            run_key_gradient<Kind<KeyGradientShape<kD, kFewTiles, true>>>(timing, x, tokens());
          },
          clear, [&] { write_gate_gradients(timing, x, tokens()); });
    }
    const SegmentLaunches launches = segment_launches(p);
    for (; x.first_head < heads; ++x.first_head) {
      launch({unsigned(launches.segments)}, {kSegmentThreads}, timing,
             [&] { prepare_segments_kernel(p, x.first_head, launches); });
      prepare_gates(timing, x);
      for_each_segment(
          x,
          [&](int queries, int keys) {
            run_query_gradient<Kind<QueryGradientShape<kD, kFewTiles, true>>>(timing, x, queries);
            run_key_gradient<Kind<KeyGradientShape<kD, kFewTiles, true>>>(timing, x, keys);
          },
          clear, [&](int keys) { write_gate_gradients(timing, x, keys); });
    }
  }
  void prepare_gates(Timing timing, const HopperBackwardArguments& x) const {
    if (gate_.empty()) return;
    const auto blocks = unsigned(kernels::ceil_div(tokens(), kStickKeys));
    launch({blocks, unsigned(problem_.workspace_heads)}, {kStickKeys}, timing,
           [&] { prepare_gates_kernel(x); });
  }
  void write_gate_gradients(Timing timing, const HopperBackwardArguments& x, int keys) const {
    if (gate_.empty()) return;
    launch({unsigned(kernels::ceil_div(keys, kStickKeys)), unsigned(key_heads())}, {kStickKeys},
           timing, [&] { write_gate_gradients_kernel(x); });
  }
  static void clear(float* sums, int64_t count) { std::fill_n(sums, count, 0.0f); }
  int key_heads() const { return std::max(1, problem_.workspace_heads / group); }
  template <typename Query>
  void run_query_gradient(Timing timing, HopperBackwardArguments& x, int queries) {
    const StickBreakingProblem& p = problem_;
    x.q = token_tiles(p, p.q, Query::kQueries);
    x.dout = token_tiles(p, p.dout, Query::kQueries);
    run_persistent<StickQueryGradientMainloop<Query>>(timing, x, queries, p.workspace_heads);
  }
  template <typename Key>
  void run_key_gradient(Timing timing, HopperBackwardArguments& x, int keys) {
    const StickBreakingProblem& p = problem_;
    x.q = token_tiles(p, p.q, Key::kQueries);
    x.dout = token_tiles(p, p.dout, Key::kQueries);
    run_persistent<StickKeyGradientMainloop<Key>>(timing, x, keys, key_heads());
  }

  std::vector<int32_t> stop_;
  std::vector<float> drem_, gate_;
  std::vector<bf16> dgate_;
  const int blocks_;
  std::vector<float> workspace_;
  StickBreakingProblem problem_;
};

// Not in the class, where it would be inline, and compiled wherever it is called.
template <int kD, bool kFewTiles, template <typename> class Kind>
void StickBreaking::run(Timing timing, float skip_epsilon) {
  clear_results();
  std::fill(stop_.begin(), stop_.end(), INT32_MIN);
  std::fill(workspace_.begin(), workspace_.end(), NAN);
  dgate_.assign(gate_.size(), bf16(NAN));
  problem_.dgate = dgate_.data();
  problem_.skip_epsilon = skip_epsilon;
  if (gate_.empty()) {
    run_forward<Kind<HopperForwardShape<kD, false, kFewTiles>>>(timing, problem_);
    backward<kD, kFewTiles, Kind>(timing);
  } else {
    run_forward<HopperForwardShape<kD, true>>(timing, problem_);
    backward<kD, kFewTiles, Gated>(timing);
  }
}
extern template void StickBreaking::run<32, false>(Timing, float);
extern template void StickBreaking::run<32, true>(Timing, float);
extern template void StickBreaking::run<32, false, Folded>(Timing, float);
extern template void StickBreaking::run<128, false>(Timing, float);
extern template void StickBreaking::run<128, false, Folded>(Timing, float);

}  // namespace sbtrain::emulation
