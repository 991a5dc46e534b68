// Matrices of more than 2^31 elements, as rows of a million tokens have them: what ops do with the
// last rows is what they do with these alone.
#include <gtest/gtest.h>

#include <numbers>
#include <string_view>
#include <vector>

#include "gpu/op_test.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/fp8.h"
#include "ops/initialize.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace sbtrain::large_test {
namespace {

constexpr int64_t kTail = 1024;  // a document, of whole tiles
constexpr int64_t kTokens = (int64_t{1} << 20) + kTail;
constexpr int64_t kHeadDim = 64;
constexpr int64_t kWidth = 33 * kHeadDim;
static_assert(kTokens * kWidth > (int64_t{1} << 31));

class LargeMatrices : public test::GpuOpTest {
 protected:
  void SetUp() override {
    test::GpuOpTest::SetUp();
    if (IsSkipped()) return;
    constexpr size_t kNeeded = size_t{32} << 30;
    if (device_memory(Backend::kCuda).free < kNeeded) GTEST_SKIP() << "less than 32 GiB are free";
  }
  Buffer matrix(int64_t rows, int64_t cols, DType dtype = DType::kBF16) {
    return gpu().memory.allocate(MemoryClass::kActivations, "matrix", dtype, {rows, cols});
  }
  // Normal numbers, which differ from row to row.
  Buffer random(std::string_view name, int64_t rows, int64_t cols, DType dtype = DType::kBF16) {
    Buffer x = matrix(rows, cols, dtype);
    ops::run(gpu(), ops::Initialize{.x_N = x.tensor().reshaped({rows * cols}),
                                    .begin = 0,
                                    .rows = rows,
                                    .cols = cols,
                                    .stored_cols = cols,
                                    .init = Init::normal(1.0),
                                    .random = Philox(5, RandomPurpose::kTest, name)});
    return x;
  }
  Buffer integers(const std::vector<int32_t>& values) {
    Buffer x = gpu().memory.allocate(MemoryClass::kInputs, "integers", DType::kI32,
                                     {static_cast<int64_t>(values.size())});
    ops::run(gpu(), ops::CopyFromHost{.y = x, .host = values.data()});
    return x;
  }
  static Tensor tail(const Tensor& x) { return x.row_range(x.rows() - kTail, kTail); }
  // A matrix of its own with the same elements.
  Buffer copy(const Tensor& x) {
    Buffer y = matrix(x.rows(), x.cols(), x.dtype);
    ops::run(gpu(), ops::Copy{.y = y, .x = x});
    return y;
  }
  std::vector<uint16_t> bits(const Tensor& x) {
    const Buffer whole = copy(x);
    std::vector<uint16_t> host(static_cast<size_t>(x.numel()));
    ops::run(gpu(), ops::CopyToHost{.host = host.data(), .x = whole});
    return host;
  }
  std::vector<double> values(const Tensor& x) {
    std::vector<double> out;
    for (const uint16_t each : bits(x)) out.push_back(test::from_bf16(each));
    return out;
  }
  void expect_same_tail(const Tensor& whole, const Tensor& alone, const char* what) {
    EXPECT_TRUE(bits(tail(whole)) == bits(alone)) << what;
  }
  void expect_near_tail(const Tensor& whole, const Tensor& alone, double bound, const char* what) {
    EXPECT_LE(test::relative_error(values(tail(whole)), values(alone)), bound) << what;
  }
};

TEST_F(LargeMatrices, ElementwiseOps) {
  const Buffer x = random("x", kTokens, kWidth);
  const Buffer y = random("y", kTokens, kWidth);
  const Buffer y_tail = copy(tail(y));
  ops::run(gpu(), ops::Add{.y = y, .x = x});
  ops::run(gpu(), ops::Add{.y = y_tail, .x = tail(x)});
  expect_same_tail(y, y_tail, "add");
  const Buffer half = matrix(kTokens, kWidth / 2), half_tail = matrix(kTail, kWidth / 2);
  ops::run(gpu(), ops::Swiglu{.y_TF = half, .gate_up_T2F = x});
  ops::run(gpu(), ops::Swiglu{.y_TF = half_tail, .gate_up_T2F = tail(x)});
  expect_same_tail(half, half_tail, "swiglu");
  ops::run(gpu(), ops::SwigluBackward{.dgate_up_T2F = y, .dy_TF = half, .gate_up_T2F = x});
  ops::run(gpu(),
           ops::SwigluBackward{.dgate_up_T2F = y_tail, .dy_TF = half_tail, .gate_up_T2F = tail(x)});
  expect_same_tail(y, y_tail, "swiglu_backward");
  ops::run(gpu(), ops::Fill{.x = y, .value = 2.0f});
  ops::run(gpu(), ops::Fill{.x = y_tail, .value = 2.0f});
  expect_same_tail(y, y_tail, "fill");
}

TEST_F(LargeMatrices, Norms) {
  const Buffer x = random("x", kTokens, kWidth);
  const Buffer dx = random("dx", kTokens, kWidth);
  const Buffer w = random("w", 1, kWidth);
  const Tensor w_D = w.tensor().reshaped({kWidth});
  const Buffer dw = matrix(1, kWidth, DType::kF32);
  const Tensor dw_D = dw.tensor().reshaped({kWidth});
  const Buffer y = matrix(kTokens, kWidth), y_tail = matrix(kTail, kWidth);
  ops::run(gpu(), ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = w_D, .eps = 1e-5f});
  ops::run(gpu(), ops::RmsNorm{.y_TD = y_tail, .x_TD = tail(x), .w_D = w_D, .eps = 1e-5f});
  expect_same_tail(y, y_tail, "rmsnorm");
  const Buffer dx_tail = copy(tail(dx));
  const auto backward = [&](const Tensor& dx_TD, const Tensor& dy_TD, const Tensor& x_TD) {
    ops::run(gpu(), ops::RmsNormBackward{.dx_TD = dx_TD,
                                         .dw_D = dw_D,
                                         .dy_TD = dy_TD,
                                         .x_TD = x_TD,
                                         .w_D = w_D,
                                         .eps = 1e-5f,
                                         .accumulate_dw = false});
  };
  backward(dx, y, x);
  backward(dx_tail, y_tail, tail(x));
  expect_same_tail(dx, dx_tail, "rmsnorm_backward");
}

TEST_F(LargeMatrices, RotationAndEmbedding) {
  std::vector<int32_t> at, ids;
  for (int64_t t = 0; t < kTokens; ++t) {
    at.push_back(static_cast<int32_t>(t));
    ids.push_back(static_cast<int32_t>(t * 31 % 1000));
  }
  const Buffer positions = integers(at), tokens = integers(ids);
  const Buffer table = random("table", 1000, kWidth);
  const Buffer x = matrix(kTokens, kWidth), x_tail = matrix(kTail, kWidth);
  ops::run(gpu(), ops::Embedding{.y_TD = x, .tokens_T = tokens, .w_VD = table});
  ops::run(gpu(), ops::Embedding{.y_TD = x_tail, .tokens_T = tail(tokens.tensor()), .w_VD = table});
  expect_same_tail(x, x_tail, "embedding");
  const ops::RopeParams params{.heads = kWidth / kHeadDim,
                               .frequencies = ops::rope_frequencies(10000, kHeadDim)};
  ops::run(gpu(), ops::Rope{.x_THd = x, .positions_T = positions, .params = params});
  ops::run(gpu(),
           ops::Rope{.x_THd = x_tail, .positions_T = tail(positions.tensor()), .params = params});
  expect_same_tail(x, x_tail, "rope");
}

// Other rows have other algorithms, so that bits may differ. dw is a sum over all rows, and is
// compared with that over two halves, of which each has fewer than 2^31 elements.
TEST_F(LargeMatrices, Products) {
  const Buffer x = random("x", kTokens, kWidth);
  const Buffer w = random("w", 128, kWidth);
  const Buffer y = matrix(kTokens, 128), y_tail = matrix(kTail, 128);
  ops::run(gpu(), ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w});
  ops::run(gpu(), ops::Linear{.y_TN = y_tail, .x_TK = tail(x), .w_NK = w});
  expect_near_tail(y, y_tail, test::kBf16Error, "linear");
  const Buffer dx = matrix(kTokens, kWidth), dx_tail = matrix(kTail, kWidth);
  ops::run(gpu(), ops::LinearBackward{.dx_TK = dx, .dy_TN = y, .w_NK = w});
  ops::run(gpu(), ops::LinearBackward{.dx_TK = dx_tail, .dy_TN = y_tail, .w_NK = w});
  expect_near_tail(dx, dx_tail, 2 * test::kBf16Error, "dx");
  const auto dw_of = [&](const std::vector<int64_t>& begins) {
    const test::OnGpu dw(gpu(), DType::kF32, {128, kWidth});
    for (size_t i = 0; i + 1 < begins.size(); ++i) {
      const int64_t count = begins[i + 1] - begins[i];
      ops::run(gpu(), ops::LinearBackward{.dw_NK = dw,
                                          .dy_TN = y.tensor().row_range(begins[i], count),
                                          .x_TK = x.tensor().row_range(begins[i], count),
                                          .accumulate_dw = i > 0});
    }
    return dw.values();
  };
  EXPECT_LE(test::relative_error(dw_of({0, kTokens}), dw_of({0, kTokens / 2, kTokens})), 1e-3);
}

TEST_F(LargeMatrices, CastsToFp8) {
  const Buffer x = random("x", kTokens, kWidth);
  const auto cast = [&](const Tensor& from, const Tensor& y, const Tensor& y_t,
                        const test::OnGpu& amax) {
    const test::OnGpu inverse(gpu(), DType::kF32, {1});
    ops::run(gpu(),
             ops::CastFp8{
                 .y_RC = y, .y_CR = y_t, .inverse_scale_1 = inverse, .x_RC = from, .amax_1 = amax});
  };
  const test::OnGpu amax(gpu(), DType::kF32, {1});
  ops::run(gpu(), ops::Amax{.amax_1 = amax, .x_RC = x});
  const Buffer y = matrix(kTokens, kWidth, DType::kE4M3);
  const Buffer y_t = matrix(kWidth, kTokens, DType::kE4M3);
  const Buffer y_tail = matrix(kTail, kWidth, DType::kE4M3);
  const Buffer y_t_tail = matrix(kWidth, kTail, DType::kE4M3);
  cast(x, y, y_t, amax);
  cast(tail(x), y_tail, y_t_tail, amax);
  const auto bytes = [&](const Tensor& row) {
    std::vector<uint8_t> host(row.bytes());
    ops::run(gpu(), ops::CopyToHost{.host = host.data(), .x = row.reshaped({row.numel()})});
    return host;
  };
  EXPECT_TRUE(bytes(tail(y)) == bytes(y_tail));
  const std::vector<uint8_t> row = bytes(y_t.tensor().row_range(kWidth - 1, 1));
  EXPECT_TRUE(std::vector<uint8_t>(row.end() - kTail, row.end()) ==
              bytes(y_t_tail.tensor().row_range(kWidth - 1, 1)));
}

// Heads are column ranges of one matrix of queries, keys and values. Documents are of kTail tokens,
// so that the last one has nothing to do with the others.
class LargeAttention : public LargeMatrices {
 protected:
  static constexpr int64_t kHeads = 11;
  static constexpr int64_t kCols = kHeads * kHeadDim;  // three of them are kWidth
  struct Pack {
    Buffer positions, ends;
    Sequences sequences;
  };
  Pack pack(int64_t tokens) {
    std::vector<int32_t> at, ends;
    for (int64_t t = 0; t < tokens; ++t) at.push_back(static_cast<int32_t>(t % kTail));
    for (int64_t t = 0; t <= tokens; t += kTail) ends.push_back(static_cast<int32_t>(t));
    Pack pack{.positions = integers(at), .ends = integers(ends), .sequences = {}};
    pack.sequences = {.cu_seqlens = pack.ends,
                      .positions_T = pack.positions,
                      .count = static_cast<int64_t>(ends.size()) - 1,
                      .max_seqlen = kTail};
    return pack;
  }
  static Tensor part(const Tensor& qkv, int64_t index) {
    return qkv.col_range(index * kCols, kCols);
  }
  // Forward and backward on all rows of qkv and dout; returns o and the gradient of qkv.
  template <typename Run>
  void expect_tail(const Run& run) {
    const Buffer qkv = random("qkv", kTokens, kWidth);
    const Buffer dout = random("dout", kTokens, kCols);
    const Buffer o = matrix(kTokens, kCols), dqkv = matrix(kTokens, kWidth);
    run(o, dqkv, qkv, dout);
    const Buffer qkv_tail = copy(tail(qkv)), dout_tail = copy(tail(dout));
    const Buffer o_tail = matrix(kTail, kCols), dqkv_tail = matrix(kTail, kWidth);
    run(o_tail, dqkv_tail, qkv_tail, dout_tail);
    expect_near_tail(o, o_tail, 4e-3, "o");
    for (int64_t i = 0; i < 3; ++i) {
      expect_near_tail(part(dqkv, i), part(dqkv_tail, i), 8e-3, "gradients");
    }
  }
};

TEST_F(LargeAttention, StickBreaking) {
  for (const float skip_epsilon : {0.0f, 0x1p-24f}) {
    expect_tail([&](const Tensor& o, const Tensor& dqkv, const Tensor& qkv, const Tensor& dout) {
      const int64_t tokens = qkv.rows();
      const Pack packed = pack(tokens);
      const Buffer rem = matrix(kHeads, tokens, DType::kF32);
      const Buffer stop = matrix(kHeads, tokens, DType::kI32);
      const ops::StickBreakingParams params{
          .heads = kHeads, .scale = 0.125f, .skip_epsilon = skip_epsilon};
      ops::run(gpu(), ops::StickBreakingForward{.o_THd = o,
                                                .log2_rem_HT = rem,
                                                .stop_HT = stop,
                                                .q_THd = part(qkv, 0),
                                                .k_THd = part(qkv, 1),
                                                .v_THd = part(qkv, 2),
                                                .sequences = packed.sequences,
                                                .params = params});
      ops::run(gpu(), ops::StickBreakingBackward{.dq_THd = part(dqkv, 0),
                                                 .dk_THd = part(dqkv, 1),
                                                 .dv_THd = part(dqkv, 2),
                                                 .do_THd = dout,
                                                 .log2_rem_HT = rem,
                                                 .stop_HT = stop,
                                                 .q_THd = part(qkv, 0),
                                                 .k_THd = part(qkv, 1),
                                                 .v_THd = part(qkv, 2),
                                                 .sequences = packed.sequences,
                                                 .params = params});
    });
  }
}

TEST_F(LargeAttention, Softmax) {
  expect_tail([&](const Tensor& o, const Tensor& dqkv, const Tensor& qkv, const Tensor& dout) {
    const int64_t tokens = qkv.rows();
    const Pack packed = pack(tokens);
    const Buffer lse = matrix(kHeads, tokens, DType::kF32);
    const ops::SoftmaxParams params{.heads = kHeads, .scale = 0.125f};
    ops::run(gpu(), ops::SoftmaxForward{.o_THd = o,
                                        .lse_HT = lse,
                                        .q_THd = part(qkv, 0),
                                        .k_THd = part(qkv, 1),
                                        .v_THd = part(qkv, 2),
                                        .sequences = packed.sequences,
                                        .params = params});
    ops::run(gpu(), ops::SoftmaxBackward{.dq_THd = part(dqkv, 0),
                                         .dk_THd = part(dqkv, 1),
                                         .dv_THd = part(dqkv, 2),
                                         .do_THd = dout,
                                         .o_THd = o,
                                         .lse_HT = lse,
                                         .q_THd = part(qkv, 0),
                                         .k_THd = part(qkv, 1),
                                         .v_THd = part(qkv, 2),
                                         .sequences = packed.sequences,
                                         .params = params});
  });
}

}  // namespace
}  // namespace sbtrain::large_test
