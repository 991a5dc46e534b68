// What gradients of a model whose products are in fp8 can be compared by.
//
// Each product in fp8 errs by 4 to 6% of its outputs (tests/unit/layers/linear_test.cpp), and
// inputs that differ by a rounding to bf16 fall to another number of fp8 here and there: after a
// few layers the roundings of two runs have as little to do with each other as with the exact
// numbers. So two correct runs do not agree better than each agrees with gradients without fp8.
// What holds is that their errors are of the same size, and that their difference is not larger
// than that of independent errors. A product by itself is compared with the same inputs, where the
// roundings are the same (tests/gpu/linear_fp8_test.cpp).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "support/tensors.h"

namespace sbtrain::test {

using Gradients = std::map<std::string, std::vector<double>>;

// The errors of a tensor of 128 elements or more differ by less than a tenth between two runs.
inline constexpr double kFp8ErrorRatio = 1.3;

inline void expect_errors_of_fp8(const Gradients& actual, const Gradients& emulated,
                                 const Gradients& exact) {
  ASSERT_EQ(actual.size(), exact.size());
  const auto distance = [](const std::vector<double>& a, const std::vector<double>& b) {
    return relative_errors(a, b).frobenius;
  };
  for (const auto& [name, reference] : exact) {
    const double error = distance(actual.at(name), reference);
    const double expected = distance(emulated.at(name), reference);
    // Both relative to the exact gradient, like the errors.
    double squares = 0, reference_squares = 0;
    for (size_t i = 0; i < reference.size(); ++i) {
      squares += std::pow(actual.at(name)[i] - emulated.at(name)[i], 2);
      reference_squares += reference[i] * reference[i];
    }
    EXPECT_LT(error, kFp8ErrorRatio * expected) << name;
    // A run that multiplies in bf16 errs less. Biases do not show it: their gradients are sums over
    // all tokens, in which errors cancel as they fall, and that of the keys' bias is nothing but
    // errors where keys are not rotated, since softmax does not see what all keys have in common.
    if (!name.ends_with(".bias")) {
      EXPECT_GT(error, expected / kFp8ErrorRatio) << name;
    }
    EXPECT_LT(std::sqrt(squares / reference_squares), std::hypot(error, expected)) << name;
  }
}

}  // namespace sbtrain::test
