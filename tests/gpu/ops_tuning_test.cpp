// Matrix products that are timed: whichever algorithm is the fastest, the bits are those of the
// same product before, so that runs on GPUs of one type give the same.
#include <gtest/gtest.h>

#include <vector>

#include "gpu/op_test.h"
#include "ops/linear.h"
#include "ops/stream_control.h"

namespace sbtrain::tuning_test {
namespace {

using test::OnGpu;
using TunedProducts = test::GpuOpTest;

// Those with many tokens and small matrices gain most from adding up parts of the tokens side by
// side (split-K), of which cuBLASLt suggests several numbers.
struct Case {
  int64_t tokens, outputs, channels;
};
constexpr Case kCases[] = {{32768, 384, 384}, {16384, 64, 128},   {8192, 1024, 384},
                           {4096, 2048, 512}, {1024, 1536, 1536}, {512, 128, 344}};

struct Bits {
  std::vector<uint8_t> y, dx, dw;
  bool operator==(const Bits&) const = default;
};

TEST_F(TunedProducts, GiveTheBitsThatTheyGaveBefore) {
  for (const Case& c : kCases) {
    const OnGpu w(gpu(), test::random_bf16("w", {c.outputs, c.channels}), DType::kBF16);
    const OnGpu x(gpu(), test::random_bf16("x", {c.tokens, c.channels}), DType::kBF16);
    const OnGpu dy(gpu(), test::random_bf16("dy", {c.tokens, c.outputs}), DType::kBF16);
    const OnGpu residual(gpu(), test::random_bf16("residual", {c.tokens, c.outputs}), DType::kBF16);
    const OnGpu y(gpu(), DType::kBF16, {c.tokens, c.outputs});
    const OnGpu dx(gpu(), DType::kBF16, {c.tokens, c.channels});
    const OnGpu dw(gpu(), DType::kF32, {c.outputs, c.channels});
    const auto products = [&] {
      ops::run(gpu(), ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w, .residual = residual});
      ops::run(
          gpu(),
          ops::LinearBackward{
              .dx_TK = dx, .dw_NK = dw, .dy_TN = dy, .x_TK = x, .w_NK = w, .accumulate_dw = false});
      ops::run(gpu(), ops::LinearBackward{.dw_NK = dw, .dy_TN = dy, .x_TK = x});
      return Bits{y.raw(), dx.raw(), dw.raw()};
    };
    const Bits before = products();
    ops::begin_tuning(gpu(), "");
    products();
    EXPECT_FALSE(ops::end_tuning(gpu(), /*remember=*/false).empty());
    EXPECT_TRUE(products() == before)
        << c.tokens << " tokens, " << c.outputs << " outputs of " << c.channels << " channels";
  }
}

}  // namespace
}  // namespace sbtrain::tuning_test
