#include "train/bits.h"

#include <gtest/gtest.h>

namespace sbtrain {
namespace {

TEST(Bits, PerplexityOfAUniformGuessIsTheVocabulary) {
  EXPECT_NEAR(perplexity(std::log(4096.0)), 4096.0, 1e-9);
}

TEST(Bits, AUniformGuessOverBytesCostsEightBits) {
  EXPECT_NEAR(bits_per_byte(std::log(256.0), 1000, 1000), 8.0, 1e-12);
}

TEST(Bits, LongerTokensSpreadTheirLossOverMoreBytes) {
  EXPECT_NEAR(bits_per_byte(std::log(2.0) * 6, 100, 400), 1.5, 1e-12);
}

TEST(Bits, WithoutBytesTheAnswerIsNotANumber) {
  EXPECT_TRUE(std::isnan(bits_per_byte(1, 1, 0)));
  EXPECT_FALSE(std::signbit(perplexity(-std::nan(""))));
}

}  // namespace
}  // namespace sbtrain
