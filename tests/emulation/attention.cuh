// What the tests of emulated attention kernels share: packs of random documents, the launch, and
// the comparison with the fp64 oracle.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/persistent_hopper.cuh"
#include "kernels/attention/stickbreaking.h"
#include "kernels/primitives/math.cuh"
#include "support/tensors.h"
#include "unit/attention/oracle.h"

namespace sbtrain::emulation {

using kernels::bf16;
using kernels::HeadRows;

// Documents that end in the middle of tiles and are followed by long ones, and many short ones.
inline const std::vector<std::vector<int32_t>> kPacks = {
    {1, 2, 127, 128, 3}, {100, 420}, {64, 150, 90, 200}};
// Bounds of relative_error(), as on a GPU.
inline constexpr double kOutputError = 4e-3, kGradientError = 8e-3, kRowError = 1e-5;

inline std::string describe_case(const std::vector<int32_t>& documents, Timing timing) {
  std::string text = timing == Timing::kLate ? "late, documents of" : "at once, documents of";
  for (const int32_t length : documents) text += " " + std::to_string(length);
  return text;
}

inline std::vector<bf16> random_bf16(const char* name, int64_t count, double size = 1) {
  const test::Owned x = test::random_normal(name, {count}, size);
  std::vector<bf16> rounded;
  for (int64_t i = 0; i < count; ++i) rounded.push_back(__float2bfloat16(x.f32()[i]));
  return rounded;
}
inline std::vector<double> to_f64(const std::vector<bf16>& x) {
  std::vector<double> y;
  for (const bf16 value : x) y.push_back(double(__bfloat162float(value)));
  return y;
}
// Gates in (0, 1], of which some are 1 and some so small that they close their keys.
inline std::vector<float> random_gates(size_t count) {
  const test::Owned x = test::random_normal("gate", {static_cast<int64_t>(count)});
  std::vector<float> gates;
  for (size_t i = 0; i < count; ++i) {
    const float u = x.f32()[i];
    gates.push_back(u > 1 ? 1.0f : u < -1.5f ? 1e-4f : 1.0f / (1.0f + std::exp(-2 * u)));
  }
  return gates;
}
template <typename T>
std::vector<double> to_f64(const std::vector<T>& x) {
  return {x.begin(), x.end()};
}

// Heads of queries, and how many of them share a head of keys and values.
struct Heads {
  int count = 2, group = 1;
};
inline constexpr Heads kGroups[] = {{4, 2}, {3, 3}};

// [T, H, d] matrices. Results are NaN before a pass writes them.
struct Attention {
  Attention(const std::vector<int32_t>& documents, int head_dim_, Heads heads_ = {})
      : heads(heads_.count),
        group(heads_.group),
        head_dim(head_dim_),
        scale(1.0f / std::sqrt(float(head_dim_))) {
    for (const int32_t length : documents) {
      bounds.push_back(bounds.back() + length);
      for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    }
    const int64_t count = int64_t{tokens()} * heads * head_dim;
    q = random_bf16("q", count);
    k = random_bf16("k", count / group);
    v = random_bf16("v", count / group);
    dout = random_bf16("dout", count);
    clear_results();
  }
  void clear_results() {
    for (auto* x : {&o, &dq}) x->assign(q.size(), bf16(NAN));
    for (auto* x : {&dk, &dv}) x->assign(k.size(), bf16(NAN));
    row.assign(static_cast<size_t>(tokens() * heads), NAN);
  }

  int tokens() const { return bounds.back(); }
  HeadRows rows(std::vector<bf16>& x) {
    return {x.data(), static_cast<int64_t>(x.size()) / tokens()};
  }
  // What the problems of all kernels have in common.
  template <typename Problem>
  void describe(Problem& p) {
    p.tokens = tokens();
    p.heads = heads;
    p.group = group;
    p.head_dim = head_dim;
    p.scale = scale;
    p.cu_seqlens = bounds.data();
    p.positions = positions.data();
    p.sequences = static_cast<int>(bounds.size()) - 1;
    p.q = rows(q);
    p.k = rows(k);
    p.v = rows(v);
    p.o = rows(o);
    p.dout = rows(dout);
    p.dq = rows(dq);
    p.dk = rows(dk);
    p.dv = rows(dv);
  }
  // Multiplies the queries by scale * log2(e) before they are rounded, for kernels that need not.
  void fold_scale_into(kernels::StickBreakingProblem& p) {
    p.query_factor = scale * kernels::kLog2e;
    p.scale = kernels::kFoldedScale;
    const test::Owned exact = test::random_normal("q", {static_cast<int64_t>(q.size())});
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = __float2bfloat16(p.query_factor * exact.f32()[i]);
    }
  }
  test::oracle::Problem oracle() const {
    test::oracle::Problem p;
    p.tokens = tokens();
    p.heads = heads;
    p.group = group;
    p.head_dim = head_dim;
    p.bounds = bounds;
    p.scale = double(scale);
    p.q = to_f64(q);
    p.k = to_f64(k);
    p.v = to_f64(v);
    p.dout = to_f64(dout);
    return p;
  }
  void expect_near(const test::oracle::Result& want) const {
    EXPECT_LE(test::relative_error(to_f64(o), want.o), kOutputError);
    EXPECT_LE(test::relative_error(to_f64(dq), want.dq), kGradientError);
    EXPECT_LE(test::relative_error(to_f64(dk), want.dk), kGradientError);
    EXPECT_LE(test::relative_error(to_f64(dv), want.dv), kGradientError);
  }

  const int heads, group, head_dim;
  const float scale;
  std::vector<int32_t> bounds = {0}, positions;
  std::vector<bf16> q, k, v, o, dout, dq, dk, dv;
  std::vector<float> row;  // [H, T]: what the forward pass leaves of each row
};

// Runs a kernel with all of its shared memory poisoned.
template <typename Kernel>
void launch(Index grid, Index block, Timing timing, const Kernel& kernel) {
  std::memset(kernels::memory, 0xff, sizeof(kernels::memory));
  run_grid(grid, block, timing, kernel);
}

// Runs a main loop (persistent_hopper.cuh): with one block, which takes all tiles in the order that
// the scheduler has prepared, or with a block for each of them, where there are few.
template <typename Mainloop>
void run_persistent(Timing timing, typename Mainloop::Arguments x, int rows, int heads) {
  static_assert(kernels::kSharedBytes<typename Mainloop::Shared> <= kernels::kMaxSharedBytes);
  constexpr unsigned kThreads = Mainloop::Shape::kThreads;
  const auto kernel = [&] { kernels::persistent_hopper_kernel<Mainloop>(x); };
  const int tiles = static_cast<int>(kernels::ceil_div(rows, Mainloop::kTileRows));
  std::vector<int32_t> words(static_cast<size_t>(1 + tiles));
  x.scheduler = kernels::tile_scheduler(x.p, heads, tiles, words.data());
  constexpr int kFewTiles = 4;
  if (tiles * heads <= kFewTiles) {
    x.scheduler.order = nullptr;
    return launch({unsigned(tiles * heads)}, {kThreads}, timing, kernel);
  }
  launch({}, {kernels::kSchedulerThreads}, timing,
         [&] { kernels::schedule_tiles_kernel(x.scheduler, kernels::steps_of<Mainloop>(x)); });
  launch({}, {kThreads}, timing, kernel);
}
template <typename Mainloop>
void run_persistent(Timing timing, typename Mainloop::Arguments x) {
  run_persistent<Mainloop>(timing, x, x.p.tokens, x.p.heads);
}

}  // namespace sbtrain::emulation
