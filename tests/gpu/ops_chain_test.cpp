// Ops that one kernel computes while they are recorded, against the same ops one by one: the bits
// are the same.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/replay.h"
#include "gpu/op_test.h"
#include "ops/attention.h"
#include "ops/chain.h"
#include "ops/linear.h"
#include "ops/memory.h"
#include "ops/rope.h"
#include "ops/sampling.h"

namespace sbtrain {
namespace {

using test::OnGpu;
using Chain = test::GpuOpTest;

constexpr DType kBF16 = DType::kBF16;

struct Case {
  int heads, key_heads, head_dim;
  int64_t inner, capacity;
};

// Layers of a model whose weights are random.
class Layers {
 public:
  Layers(test::GpuStream& s, const Case& c, int64_t rows, bool softmax)
      : s_(s),
        c_(c),
        softmax_(softmax),
        width_(int64_t{c.heads} * c.head_dim),
        keys_(int64_t{c.key_heads} * c.head_dim),
        input_(tensor({rows, width_})),
        x_(tensor({rows, width_})),
        h_(tensor({rows, width_})),
        mix_(tensor({rows, width_})),
        qkv_(tensor({rows, width_ + 2 * keys_})),
        inner_(tensor({rows, c.inner})) {
    std::vector<int32_t> lengths;
    for (int64_t row = 0; row < rows; ++row) {
      lengths.push_back(static_cast<int32_t>(c.capacity - row * (c.capacity / rows)));
    }
    lengths_ = std::make_unique<OnGpu>(s, test::integers(lengths), DType::kI32);
    for (int i = 0; i < kLayers; ++i) {
      layers_.push_back({tensor({width_}), tensor({width_ + 2 * keys_, width_}),
                         tensor({rows, c.capacity, keys_}), tensor({rows, c.capacity, keys_}),
                         tensor({width_, width_}), tensor({width_}), tensor({2 * c.inner, width_}),
                         tensor({width_, c.inner})});
    }
  }
  void run() const {
    ops::run(s_, ops::Copy{.y = x(), .x = *input_});
    for (const Layer& w : layers_) {
      ops::run(s_, ops::DecodeLinear{.y_BN = *qkv_,
                                     .x_BK = x(),
                                     .w_NK = *w.qkv,
                                     .alpha = 0.03f,
                                     .norm_K = *w.norm1,
                                     .norm_eps = 1e-5f});
      attend(w);
      ops::run(
          s_,
          ops::Linear{.y_TN = *h_, .x_TK = *mix_, .w_NK = *w.out, .alpha = 0.03f, .residual = x()});
      ops::run(s_, ops::DecodeLinear{.y_BN = *inner_,
                                     .x_BK = *h_,
                                     .w_NK = *w.gate_up,
                                     .alpha = 0.03f,
                                     .norm_K = *w.norm2,
                                     .norm_eps = 1e-5f,
                                     .swiglu = true});
      ops::run(s_,
               ops::Linear{
                   .y_TN = x(), .x_TK = *inner_, .w_NK = *w.down, .alpha = 0.02f, .residual = *h_});
    }
  }
  std::vector<double> result() const { return x_->values(); }

 private:
  static constexpr int kLayers = 3;
  using Random = std::unique_ptr<OnGpu>;
  struct Layer {
    Random norm1, qkv, k, v, out, norm2, gate_up, down;
  };
  Random tensor(std::vector<int64_t> shape) {
    const std::string name = "chain " + std::to_string(made_++);
    return std::make_unique<OnGpu>(s_, test::random_bf16(name, std::move(shape)), kBF16);
  }
  Tensor x() const { return *x_; }
  template <typename Op>
  void attend(Op op, const Layer& w) const {
    const Tensor qkv = *qkv_;
    op.o_BHd = *mix_;
    op.q_BHd = qkv.col_range(0, width_);
    op.k_BGd = qkv.col_range(width_, keys_);
    op.v_BGd = qkv.col_range(width_ + keys_, keys_);
    op.k_cache_BCGd = *w.k;
    op.v_cache_BCGd = *w.v;
    op.lengths_B = *lengths_;
    op.params.heads = c_.heads;
    op.params.scale = 0.1f;
    ops::run(s_, op);
  }
  void attend(const Layer& w) const {
    if (!softmax_) return attend(ops::StickBreakingDecode(), w);
    ops::run(s_, ops::Rope{.x_THd = qkv_->tensor().col_range(0, width_ + keys_),
                           .positions_T = *lengths_,
                           .params = {.heads = c_.heads + c_.key_heads,
                                      .frequencies = ops::rope_frequencies(1e4, c_.head_dim)}});
    attend(ops::SoftmaxDecode(), w);
  }

  int made_ = 0;
  test::GpuStream& s_;
  Case c_;
  bool softmax_;
  int64_t width_, keys_;
  Random input_, x_, h_, mix_, qkv_, inner_, lengths_;
  std::vector<Layer> layers_;
};

// Many runs: the blocks of the kernel wait for each other hundreds of times.
TEST_F(Chain, HasTheBitsOfItsOps) {
  ops::set_overlap(gpu(), true);
  int64_t variant = 0;
  Replay replay(gpu());
  for (const Case& c : {Case{6, 6, 64, 1056, 300}, Case{4, 2, 128, 736, 1200}}) {
    for (const int64_t rows : {1, 5, 8}) {
      for (const bool softmax : {false, true}) {
        const Layers layers(gpu(), c, rows, softmax);
        layers.run();
        const std::vector<double> expected = layers.result();
        for (int run = 0; run < 20; ++run) {
          replay.run("chain", variant, [&] { ops::run_chained(gpu(), [&] { layers.run(); }); });
          ASSERT_EQ(layers.result(), expected)
              << rows << " rows of " << c.heads << " heads, run " << run;
        }
        ++variant;
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain
