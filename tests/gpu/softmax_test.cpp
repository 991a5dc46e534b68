// Softmax attention on the GPU, portable, for Hopper and by cuDNN, against the fp64 oracle. Skipped
// if there is no GPU. `sbtrain bench attention` times both.
#include "kernels/attention/softmax.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>

#include "gpu/device.h"
#include "kernels/attention/scratch_sizes.h"
#include "ops/attention.h"
#include "ops/choose.h"
#include "ops/cuda/context.h"
#include "ops/cuda/cudnn_attention.h"
#include "support/gpu.h"
#include "support/tensors.h"
#include "unit/attention/oracle.h"

namespace sbtrain::test {
namespace {

using kernels::SoftmaxProblem;
using ops::cuda::CudnnAttention;

static_assert(ops::cudnn_batch(0) == 1 && ops::cudnn_batch(8) == 8);
static_assert(ops::cudnn_batch(9) == 10 && ops::cudnn_batch(17) == 20);
static_assert(ops::cudnn_batch(4096) == 4096);

enum class Path : uint8_t { kPortable, kHopper, kCudnn, kCudnnAnyOrder };
const char* name_of(Path path) {
  switch (path) {
    case Path::kPortable:
      return "portable";
    case Path::kHopper:
      return "Hopper";
    case Path::kCudnn:
      return "cuDNN";
    case Path::kCudnnAnyOrder:
      return "cuDNN, any order";
  }
  return "";
}

struct GpuCase {
  std::vector<int32_t> documents;
  int heads = 2;
  int64_t head_dim = 64;
  int64_t window = 0;
  int group = 1;    // heads of queries that share a head of keys and values
  double peak = 0;  // the largest |logit|; 0: that of standard normal q and k

  int64_t tokens() const { return std::accumulate(documents.begin(), documents.end(), int64_t{0}); }
  int64_t width() const { return heads * head_dim; }
  int64_t key_width() const { return width() / group; }
  int64_t qkv_width() const { return width() + 2 * key_width(); }
  std::string describe() const {
    return std::to_string(documents.size()) + " documents, " + std::to_string(tokens()) +
           " tokens, head dimension " + std::to_string(head_dim) + ", window " +
           std::to_string(window) + ", " + std::to_string(heads) + " heads in groups of " +
           std::to_string(group) + ", peak " + std::to_string(peak);
  }
};
// Documents end at, before and after the ends of tiles.
const std::vector<int32_t> kMixed = {1, 2, 127, 128, 129, 500, 1, 1};
const std::vector<int32_t> kLong = {3, 4096, 70};

constexpr uint16_t kPoison = 0xffff;  // NaN
constexpr int64_t kGap = 8;           // elements after each row that no kernel may touch

// A bf16 matrix with a gap after each row.
struct Matrix {
  Matrix(int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        stride(cols + kGap),
        bits(static_cast<size_t>(rows * stride), kPoison) {}
  uint16_t& at(int64_t row, int64_t col) { return bits[static_cast<size_t>(row * stride + col)]; }
  std::vector<double> part(int64_t first, int64_t count) const {
    std::vector<double> out;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < count; ++c) {
        out.push_back(from_bf16(bits[static_cast<size_t>(r * stride + first + c)]));
      }
    }
    return out;
  }
  bool gaps_intact() const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = cols; c < stride; ++c) {
        if (bits[static_cast<size_t>(r * stride + c)] != kPoison) return false;
      }
    }
    return true;
  }
  int64_t rows, cols, stride;
  std::vector<uint16_t> bits;
};

Matrix random_matrix(std::string_view name, int64_t rows, int64_t cols) {
  const Philox random(1, RandomPurpose::kTest, name);
  Matrix m(rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      m.at(r, c) = to_bf16(static_cast<float>(random.normal(static_cast<uint64_t>(r * cols + c))));
    }
  }
  return m;
}

struct Outputs {
  Matrix o, dqkv;
  std::vector<float> lse;
};

class SoftmaxCase {
 public:
  explicit SoftmaxCase(const GpuCase& c)
      : config_(c),
        qkv_(random_matrix("qkv", c.tokens(), c.qkv_width())),
        dout_(random_matrix("do", c.tokens(), c.width())) {
    for (const int32_t length : c.documents) {
      bounds_.push_back(bounds_.back() + length);
      for (int32_t i = 0; i < length; ++i) positions_.push_back(i);
    }
    if (c.peak > 0) scale_logits();
  }

  // Fills all documents but the one of tokens [first, last) with large finite numbers.
  void poison_others(int64_t first, int64_t last) {
    for (int64_t t = 0; t < config_.tokens(); ++t) {
      if (t >= first && t < last) continue;
      for (int64_t c = 0; c < config_.qkv_width(); ++c) {
        qkv_.at(t, c) = to_bf16(c % 2 == 0 ? 1e18f : -1e18f);
      }
      for (int64_t c = 0; c < config_.width(); ++c) dout_.at(t, c) = to_bf16(1e18f);
    }
  }

  const oracle::Result& expected() {
    if (!expected_) {
      oracle::Problem p = problem_of_oracle();
      p.dout = dout_.part(0, config_.width());
      expected_ = std::make_unique<oracle::Result>(oracle::softmax(p));
    }
    return *expected_;
  }

  // run(problem) computes o and lse, then dq, dk and dv.
  template <typename Run>
  Outputs compute(Run&& run) const {
    const int64_t width = config_.width(), keys = config_.key_width();
    Outputs out{Matrix(config_.tokens(), width), Matrix(config_.tokens(), config_.qkv_width()),
                std::vector<float>(static_cast<size_t>(config_.heads * config_.tokens()), NAN)};
    const OnDevice<uint16_t> qkv(qkv_.bits), dout(dout_.bits), o(out.o.bits), dqkv(out.dqkv.bits);
    const OnDevice<float> lse(out.lse);
    const OnDevice<int32_t> bounds(bounds_), positions(positions_);
    const auto rows = [](const OnDevice<uint16_t>& x, const Matrix& m, int64_t first) {
      return kernels::HeadRows{reinterpret_cast<__nv_bfloat16*>(x.data() + first), m.stride};
    };
    SoftmaxProblem p{.tokens = static_cast<int>(config_.tokens()),
                     .heads = config_.heads,
                     .head_dim = static_cast<int>(config_.head_dim),
                     .scale = scale(),
                     .window = static_cast<int>(config_.window),
                     .group = config_.group,
                     .cu_seqlens = bounds.data(),
                     .positions = positions.data(),
                     .sequences = static_cast<int>(config_.documents.size()),
                     .max_seqlen = longest(),
                     .q = rows(qkv, qkv_, 0),
                     .k = rows(qkv, qkv_, width),
                     .v = rows(qkv, qkv_, width + keys),
                     .o = rows(o, out.o, 0),
                     .lse = lse.data(),
                     .dout = rows(dout, dout_, 0),
                     .dq = rows(dqkv, out.dqkv, 0),
                     .dk = rows(dqkv, out.dqkv, width),
                     .dv = rows(dqkv, out.dqkv, width + keys)};
    SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());  // run() may use another stream
    run(p);
    SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());
    out.o.bits = o.values();
    out.dqkv.bits = dqkv.values();
    out.lse = lse.values();
    return out;
  }

  void expect_close(const Outputs& out, const std::string& text) {
    const oracle::Result& want = expected();
    const int64_t width = config_.width(), keys = config_.key_width();
    const std::vector<double> lse(out.lse.begin(), out.lse.end());
    EXPECT_LE(relative_error(out.o.part(0, width), want.o), 4e-3) << "o, " << text;
    EXPECT_LE(relative_error(lse, want.row), 1e-5) << "lse, " << text;
    EXPECT_LE(relative_error(out.dqkv.part(0, width), want.dq), 8e-3) << "dq, " << text;
    EXPECT_LE(relative_error(out.dqkv.part(width, keys), want.dk), 8e-3) << "dk, " << text;
    EXPECT_LE(relative_error(out.dqkv.part(width + keys, keys), want.dv), 8e-3) << "dv, " << text;
    EXPECT_TRUE(out.o.gaps_intact() && out.dqkv.gaps_intact()) << text;
  }

 private:
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim)); }
  int longest() const {
    return *std::max_element(config_.documents.begin(), config_.documents.end());
  }
  oracle::Problem problem_of_oracle() const {
    const int64_t width = config_.width(), keys = config_.key_width();
    oracle::Problem p;
    p.tokens = config_.tokens();
    p.heads = config_.heads;
    p.head_dim = config_.head_dim;
    p.group = config_.group;
    p.bounds = bounds_;
    p.scale = scale();
    p.window = config_.window;
    p.q = qkv_.part(0, width);
    p.k = qkv_.part(width, keys);
    p.v = qkv_.part(width + keys, keys);
    return p;
  }
  // Scales q so that the largest |logit| of a pair within a document is the case's peak.
  void scale_logits() {
    const oracle::Problem p = problem_of_oracle();
    double largest = 0;
    for (size_t n = 0; n + 1 < bounds_.size(); ++n) {
      for (int64_t j = bounds_[n]; j < bounds_[n + 1]; ++j) {
        for (int64_t i = bounds_[n]; i <= j; ++i) {
          for (int64_t h = 0; h < p.heads; ++h) {
            largest =
                std::max(largest, std::abs(p.scale * oracle::dot(p, p.q, oracle::at(p, j, h), p.k,
                                                                 oracle::key_at(p, i, h))));
          }
        }
      }
    }
    for (int64_t t = 0; t < config_.tokens(); ++t) {
      for (int64_t c = 0; c < config_.width(); ++c) {
        qkv_.at(t, c) = to_bf16(from_bf16(qkv_.at(t, c)) * config_.peak / largest);
      }
    }
  }

  GpuCase config_;
  Matrix qkv_, dout_;
  std::vector<int32_t> bounds_ = {0}, positions_;
  std::unique_ptr<oracle::Result> expected_;
};

// Poisoned scratch memory.
OnDevice<std::byte> scratch_of(size_t bytes) {
  return OnDevice<std::byte>(std::vector<std::byte>(bytes, std::byte{0xff}));
}

Tensor bytes_of(const OnDevice<std::byte>& scratch, size_t bytes) {
  return Tensor(scratch.data(), DType::kU8, {static_cast<int64_t>(bytes)});
}

void run_portable(const SoftmaxProblem& p) {
  const OnDevice<std::byte> scratch =
      scratch_of(kernels::softmax_backward_scratch_bytes(p.tokens, p.heads));
  kernels::softmax_forward(nullptr, p, scratch.data());
  kernels::softmax_backward(nullptr, p, scratch.data());
  SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());
}

// Which passes run on the kernels for Hopper; the other one runs on the portable ones.
enum class HopperPasses : uint8_t { kBoth, kForward, kBackward };
void run_hopper(const SoftmaxProblem& p, HopperPasses passes = HopperPasses::kBoth) {
  const OnDevice<std::byte> scratch =
      scratch_of(kernels::softmax_backward_scratch_bytes(p.tokens, p.heads));
  const OnDevice<std::byte> scheduler = scratch_of(kernels::tile_scheduler_bytes(p.tokens));
  if (passes == HopperPasses::kBackward) {
    kernels::softmax_forward(nullptr, p, scratch.data());
  } else {
    kernels::softmax_forward_hopper(nullptr, p, scratch.data(), scheduler.data());
  }
  if (passes == HopperPasses::kForward) {
    kernels::softmax_backward(nullptr, p, scratch.data());
  } else {
    kernels::softmax_backward_hopper(nullptr, p, scratch.data(), scheduler.data());
  }
  SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());
}

// Takes the scratch that cuDNN's plans need, which the bounds for memory planning must cover.
void run_cudnn(CudnnAttention& cudnn, const SoftmaxProblem& p, bool deterministic) {
  const size_t forward = cudnn.bytes(p, false), backward = cudnn.bytes(p, true);
  const OnDevice<std::byte> scratch = scratch_of(std::max<size_t>({forward, backward, 256}));
  const Tensor workspace = bytes_of(scratch, std::max(forward, backward));
  ASSERT_EQ(cudnn.run(nullptr, p, workspace, /*backward=*/false), "");
  ASSERT_EQ(cudnn.run(nullptr, p, workspace, /*backward=*/true), "");
  SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());

  const int64_t batch = ops::cudnn_batch(p.sequences);
  const size_t own = ops::cudnn_statistics_bytes(p.tokens, p.heads) + ops::cudnn_index_bytes(batch);
  ops::SoftmaxShape shape{.tokens = p.tokens,
                          .heads = p.heads,
                          .head_dim = p.head_dim,
                          .max_seqlen = p.max_seqlen,
                          .window = p.window,
                          .dq_stride = p.dq.stride,
                          .deterministic = deterministic,
                          .group = p.group};
  const size_t forward_bound = own + ops::cudnn_workspace_bytes(shape, p.heads, batch);
  shape.backward = true;
  const size_t backward_bound = own + ops::cudnn_workspace_bytes(shape, p.heads, batch);
  std::printf(
      "cuDNN scratch, T %d H %d d %d B %d S %d window %d %s: forward %zu (bound %zu), "
      "backward %zu (bound %zu), of which ours %zu\n",
      p.tokens, p.heads, p.head_dim, static_cast<int>(batch), p.max_seqlen, p.window,
      deterministic ? "deterministic" : "any order", forward, forward_bound, backward,
      backward_bound, own);
  EXPECT_LE(forward, forward_bound);
  EXPECT_LE(backward, backward_bound);
}

class GpuSoftmax : public GpuTest {
 protected:
  // Runs every case twice; the bits must be equal if the order of summation is fixed.
  void check(Path path, const std::vector<GpuCase>& cases) {
    std::unique_ptr<CudnnAttention> cudnn;
    const bool deterministic = path != Path::kCudnnAnyOrder;
    if (path == Path::kCudnn || path == Path::kCudnnAnyOrder) {
      std::string why;
      cudnn = CudnnAttention::open(deterministic, &why);
      if (!cudnn) GTEST_SKIP() << why;
      std::printf("cuDNN %s\n", cudnn->version().c_str());
    }
    const auto run = [&](const SoftmaxProblem& p) {
      if (cudnn) return run_cudnn(*cudnn, p, deterministic);
      path == Path::kHopper ? run_hopper(p) : run_portable(p);
    };
    for (const GpuCase& c : cases) {
      const std::string text = std::string(name_of(path)) + ", " + c.describe();
      SoftmaxCase x(c);
      const Outputs first = x.compute(run);
      x.expect_close(first, text);
      const Outputs again = x.compute(run);
      EXPECT_EQ(first.o.bits, again.o.bits) << text;
      EXPECT_EQ(first.lse, again.lse) << text;
      if (deterministic) {
        EXPECT_EQ(first.dqkv.bits, again.dqkv.bits) << text;
      }
    }
  }
};

std::vector<GpuCase> cases_of(const std::vector<int64_t>& head_dims) {
  std::vector<GpuCase> cases;
  for (const int64_t d : head_dims) {
    for (const int64_t window : {0, 100}) {
      cases.push_back({.documents = kMixed, .head_dim = d, .window = window});
      cases.push_back({.documents = kLong, .heads = 1, .head_dim = d, .window = window});
    }
    cases.push_back({.documents = kMixed, .head_dim = d, .peak = 100});
  }
  for (const int64_t window : {1, 3, 64, 1000}) {
    cases.push_back({.documents = kMixed, .window = window});
    cases.push_back({.documents = kLong, .heads = 1, .head_dim = 32, .window = window});
  }
  cases.push_back({.documents = {1}});
  cases.push_back({.documents = {64}, .window = 1});
  cases.push_back({.documents = std::vector<int32_t>(300, 3)});
  return cases;
}

TEST_F(GpuSoftmax, Portable) {
  check(Path::kPortable, cases_of({32, 48, 64, 128, 200, 256}));
}

// Eight heads of queries, in groups down to multi-query attention.
std::vector<GpuCase> grouped_cases(const std::vector<int64_t>& head_dims) {
  std::vector<GpuCase> cases;
  for (const int64_t d : head_dims) {
    for (const int group : {2, 4, 8}) {
      for (const int64_t window : {0, 100}) {
        cases.push_back({.documents = {1, 2, 127, 128, 129, 500},
                         .heads = 8,
                         .head_dim = d,
                         .window = window,
                         .group = group});
      }
    }
    cases.push_back({.documents = kLong, .heads = 6, .head_dim = d, .group = 3});
  }
  return cases;
}
TEST_F(GpuSoftmax, PortableGroups) {
  check(Path::kPortable, grouped_cases({32, 48, 64, 128, 256}));
}

bool has_hopper() {
  return present_target(Backend::kCuda).sm == 90;
}

// The cases that the kernels for Hopper take, and documents that end everywhere in their tiles.
std::vector<GpuCase> hopper_cases() {
  std::vector<GpuCase> cases = cases_of({32, 64, 128});
  std::erase_if(cases, [](const GpuCase& c) { return c.tokens() < kernels::kHopperTokens; });
  const std::vector<int32_t> everywhere = {63, 64, 65, 127, 128, 129, 191, 192, 193, 2, 1, 7};
  for (const int64_t d : {32, 64, 128}) {
    for (const int64_t window : {0, 1, 65, 130}) {
      cases.push_back({.documents = everywhere, .heads = 3, .head_dim = d, .window = window});
    }
    // Half of a tile of keys belongs to a document that has ended while many queries still see the
    // other half.
    cases.push_back({.documents = {100, 1000, 60, 1100, 5, 700}, .head_dim = d});
    cases.push_back({.documents = {64, 1000, 216, 1200}, .head_dim = d, .window = 600});
    for (const int32_t length : {128, 129, 191, 192, 193, 256, 257}) {
      cases.push_back({.documents = {length}, .heads = 1, .head_dim = d});
    }
  }
  return cases;
}
TEST_F(GpuSoftmax, Hopper) {
  if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  check(Path::kHopper, hopper_cases());
}

TEST_F(GpuSoftmax, HopperGroups) {
  if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  check(Path::kHopper, grouped_cases({32, 64, 128}));
}

// Each pass together with the other one of the portable kernels, and both against these.
TEST_F(GpuSoftmax, HopperAgreesWithPortable) {
  if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  for (const int64_t d : {32, 64, 128}) {
    for (const int64_t window : {0, 100}) {
      const GpuCase c{.documents = kMixed, .head_dim = d, .window = window};
      SoftmaxCase x(c);
      const auto by = [&](HopperPasses passes) {
        return x.compute([&](const SoftmaxProblem& p) { run_hopper(p, passes); });
      };
      x.expect_close(by(HopperPasses::kForward), "Hopper, then portable, " + c.describe());
      x.expect_close(by(HopperPasses::kBackward), "portable, then Hopper, " + c.describe());
      const Outputs portable = x.compute(run_portable), hopper = by(HopperPasses::kBoth);
      const int64_t width = c.width();
      EXPECT_LE(relative_error(hopper.o.part(0, width), portable.o.part(0, width)), 4e-3);
      EXPECT_LE(relative_error(hopper.dqkv.part(0, 3 * width), portable.dqkv.part(0, 3 * width)),
                8e-3);
    }
  }
}

// Large finite numbers in neighbouring documents change nothing.
TEST_F(GpuSoftmax, NothingLeaksBetweenDocuments) {
  for (const Path path : {Path::kPortable, Path::kHopper}) {
    if (path == Path::kHopper && !has_hopper()) continue;
    for (const int64_t d : {64, 128}) {
      const GpuCase c{.documents = {100, 60, 200}, .head_dim = d};
      SoftmaxCase clean(c), poisoned(c);
      poisoned.poison_others(100, 160);
      const auto run = [&](const SoftmaxProblem& p) {
        path == Path::kHopper ? run_hopper(p) : run_portable(p);
      };
      Outputs a = clean.compute(run), b = poisoned.compute(run);
      for (int64_t t = 100; t < 160; ++t) {
        for (int64_t i = 0; i < c.width(); ++i) {
          ASSERT_EQ(a.o.at(t, i), b.o.at(t, i)) << name_of(path) << ", " << d << ", " << t;
        }
        for (int64_t i = 0; i < 3 * c.width(); ++i) {
          ASSERT_EQ(a.dqkv.at(t, i), b.dqkv.at(t, i)) << name_of(path) << ", " << d << ", " << t;
        }
      }
    }
  }
}

// Without a document of one token, which cuDNN's backward pass does not support.
std::vector<GpuCase> cudnn_cases() {
  std::vector<GpuCase> cases = cases_of({32, 64, 128});
  std::erase_if(cases, [](const GpuCase& c) { return c.tokens() == 1; });
  return cases;
}
TEST_F(GpuSoftmax, Cudnn) {
  check(Path::kCudnn, cudnn_cases());
}
TEST_F(GpuSoftmax, CudnnAnyOrder) {
  check(Path::kCudnnAnyOrder, cudnn_cases());
}

// The two passes may use different implementations, because lse has the same meaning in both.
TEST_F(GpuSoftmax, PathsMix) {
  std::string why;
  const std::unique_ptr<CudnnAttention> cudnn = CudnnAttention::open(/*deterministic=*/true, &why);
  if (!cudnn) GTEST_SKIP() << why;
  SoftmaxCase x({.documents = kMixed});
  const auto run = [&](const SoftmaxProblem& p, bool cudnn_first) {
    const size_t bytes = std::max({cudnn->bytes(p, false), cudnn->bytes(p, true),
                                   kernels::softmax_backward_scratch_bytes(p.tokens, p.heads)});
    const OnDevice<std::byte> scratch = scratch_of(bytes);
    if (cudnn_first) {
      ASSERT_EQ(cudnn->run(nullptr, p, bytes_of(scratch, bytes), /*backward=*/false), "");
      kernels::softmax_backward(nullptr, p, scratch.data());
    } else {
      kernels::softmax_forward(nullptr, p, scratch.data());
      ASSERT_EQ(cudnn->run(nullptr, p, bytes_of(scratch, bytes), /*backward=*/true), "");
    }
    SBTRAIN_CUDA_CHECK(cudaDeviceSynchronize());
  };
  for (const bool cudnn_first : {false, true}) {
    x.expect_close(x.compute([&](const SoftmaxProblem& p) { run(p, cudnn_first); }),
                   cudnn_first ? "cuDNN, then portable" : "portable, then cuDNN");
  }
}

// Too little scratch is a reason to choose another implementation, not an error.
TEST_F(GpuSoftmax, CudnnSaysWhatItLacks) {
  std::string why;
  const std::unique_ptr<CudnnAttention> cudnn = CudnnAttention::open(/*deterministic=*/true, &why);
  if (!cudnn) GTEST_SKIP() << why;
  const SoftmaxCase x({.documents = kMixed});
  x.compute([&](const SoftmaxProblem& p) {
    EXPECT_NE(cudnn->run(nullptr, p, {}, /*backward=*/false), "");
    EXPECT_NE(cudnn->run(nullptr, p, {}, /*backward=*/true), "");
  });
}

// The op chooses an implementation itself and runs with the scratch that it has planned.
TEST_F(GpuSoftmax, Op) {
  Memory memory(Backend::kCuda);
  Stream stream(memory);
  for (const auto& [window, group] : {std::pair{0, 1}, std::pair{100, 1}, std::pair{0, 2}}) {
    const GpuCase c{.documents = kMixed, .heads = 4, .window = window, .group = group};
    SoftmaxCase x(c);
    const Outputs out = x.compute([&](const SoftmaxProblem& p) {
      const auto matrix = [&](const kernels::HeadRows& rows, int64_t cols) {
        Tensor t(rows.data, DType::kBF16, {c.tokens(), cols});
        t.row_stride = rows.stride;
        return t;
      };
      const auto tensor = [&](const kernels::HeadRows& rows) { return matrix(rows, c.width()); };
      const auto keys = [&](const kernels::HeadRows& rows) { return matrix(rows, c.key_width()); };
      const auto indices = [](const int32_t* data, int64_t count) {
        return Tensor(const_cast<int32_t*>(data), DType::kI32, {count});
      };
      const Sequences sequences{.cu_seqlens = indices(p.cu_seqlens, p.sequences + 1),
                                .positions_T = indices(p.positions, p.tokens),
                                .count = p.sequences,
                                .max_seqlen = p.max_seqlen};
      const ops::SoftmaxParams params{.heads = p.heads, .scale = p.scale, .window = p.window};
      const Tensor lse(p.lse, DType::kF32, {p.heads, p.tokens});
      ops::run(stream, ops::SoftmaxForward{.o_THd = tensor(p.o),
                                           .lse_HT = lse,
                                           .q_THd = tensor(p.q),
                                           .k_THd = keys(p.k),
                                           .v_THd = keys(p.v),
                                           .sequences = sequences,
                                           .params = params});
      ops::run(stream, ops::SoftmaxBackward{.dq_THd = tensor(p.dq),
                                            .dk_THd = keys(p.dk),
                                            .dv_THd = keys(p.dv),
                                            .do_THd = tensor(p.dout),
                                            .o_THd = tensor(p.o),
                                            .lse_HT = lse,
                                            .q_THd = tensor(p.q),
                                            .k_THd = keys(p.k),
                                            .v_THd = keys(p.v),
                                            .sequences = sequences,
                                            .params = params});
    });
    x.expect_close(out, "op, " + c.describe());
  }
}

}  // namespace
}  // namespace sbtrain::test
