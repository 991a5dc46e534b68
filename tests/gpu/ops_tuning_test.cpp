// Matrix products that are timed: whichever algorithm is the fastest, the bits are those of the
// same product before, so that runs on GPUs of one type give the same.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "gpu/op_test.h"
#include "ops/linear.h"
#include "ops/stream_control.h"
#include "support/process.h"

namespace sbtrain::tuning_test {
namespace {

using test::OnGpu;

// The choices that this machine has kept are those of other runs.
class TunedProducts : public test::GpuOpTest {
 protected:
  void SetUp() override {
    if (const char* cache = std::getenv(kCache)) before_ = cache;
    setenv(kCache, empty_.path().c_str(), /*overwrite=*/1);
    GpuOpTest::SetUp();
  }
  // Ends the tuning, which has chosen something.
  void expect_more(std::string& choices) {
    const std::string now = ops::end_tuning(gpu(), /*remember=*/false);
    EXPECT_GT(now.size(), choices.size());
    choices = now;
  }
  void TearDown() override {
    before_ ? setenv(kCache, before_->c_str(), 1) : unsetenv(kCache);
    GpuOpTest::TearDown();
  }

 private:
  static constexpr const char* kCache = "XDG_CACHE_HOME";
  test::TemporaryFolder empty_;
  std::optional<std::string> before_;
};

// A sum over many tokens, of few outputs of many channels, or over channels that are no multiple of
// 8: of these, cuBLASLt suggests algorithms that add up in different orders (split-K).
struct Case {
  int64_t tokens, outputs, channels;
};
constexpr Case kCases[] = {{32768, 384, 384}, {16384, 64, 128},   {8192, 1024, 384},
                           {4096, 2048, 512}, {1024, 1536, 1536}, {512, 128, 344},
                           {131072, 64, 60},  {131072, 64, 64},   {65536, 384, 384},
                           {512, 128, 16384}, {2048, 64, 8192}};

struct Bits {
  std::vector<uint8_t> y, dx, dw;
  bool operator==(const Bits&) const = default;
};

TEST_F(TunedProducts, GiveTheBitsThatTheyGaveBefore) {
  std::string choices;
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
    expect_more(choices);
    EXPECT_TRUE(products() == before)
        << c.tokens << " tokens, " << c.outputs << " outputs of " << c.channels << " channels";
  }
}

// The layers of a new model add little to its embeddings, and a bf16 of the sum has few bits of it.
// Algorithms that differ in the others must be told apart all the same: they show when layers have
// learned. Here a sum has no bit of the product.
TEST_F(TunedProducts, GiveTheirBitsWhateverTheyWereAddedTo) {
  std::string choices;
  for (const Case& c : kCases) {
    const OnGpu w(gpu(), test::random_bf16("w", {c.outputs, c.channels}), DType::kBF16);
    const OnGpu x(gpu(), test::random_bf16("x", {c.tokens, c.channels}), DType::kBF16);
    const OnGpu y(gpu(), DType::kBF16, {c.tokens, c.outputs});
    const std::vector<int64_t> shape = {c.tokens, c.outputs};
    const OnGpu hides(gpu(), test::random_bf16("residual", shape, /*std=*/1e12), DType::kBF16);
    const OnGpu zeros(gpu(), test::random_bf16("residual", shape, /*std=*/0), DType::kBF16);
    const auto product = [&](const OnGpu& residual) {
      ops::run(gpu(), ops::Linear{.y_TN = y, .x_TK = x, .w_NK = w, .residual = residual});
      return y.raw();
    };
    const std::vector<uint8_t> before = product(zeros);
    ops::begin_tuning(gpu(), "");
    product(hides);
    expect_more(choices);
    EXPECT_TRUE(product(zeros) == before)
        << c.tokens << " tokens, " << c.outputs << " outputs of " << c.channels << " channels";
  }
}

}  // namespace
}  // namespace sbtrain::tuning_test
