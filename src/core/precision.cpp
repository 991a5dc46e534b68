#include "core/precision.h"

#include <fmt/format.h>

namespace sbtrain {

PrecisionPolicy precision_policy(Precision precision, DType held) {
  LinearTypes linear{.inputs = held, .weights = held, .gradients = held};
  if (precision == Precision::kFp8) {
    linear = {.inputs = DType::kE4M3, .weights = DType::kE4M3, .gradients = DType::kE5M2};
  }
  return {.weights = held,
          .activations = held,
          .weight_gradients = DType::kF32,
          .state = DType::kF32,
          .linear = linear};
}

std::string PrecisionPolicy::describe() const {
  const std::string matrices =
      linear.fp8() ? fmt::format(" (matrices of blocks {})", dtype_name(linear.weights)) : "";
  return fmt::format(
      "weights {}{}, activations {}, gradients of weights {}, optimizer {}; products of blocks {} "
      "x "
      "{}, of gradients {}",
      dtype_name(weights), matrices, dtype_name(activations), dtype_name(weight_gradients),
      dtype_name(state), dtype_name(linear.inputs), dtype_name(linear.weights),
      dtype_name(linear.gradients));
}

}  // namespace sbtrain
