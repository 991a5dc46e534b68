// In which types a run holds and multiplies its numbers, by role.
#pragma once

#include <cstdint>
#include <string>

#include "core/enum_names.h"
#include "core/tensor.h"

namespace sbtrain {

// What products of the blocks' linear layers take: what activations are held in (bf16 on a GPU, f32
// on the CPU), or fp8; or, in a configuration, the faster of the two (train/precision_choice.h).
enum class Precision : uint8_t { kBf16, kFp8, kAuto };
template <>
inline constexpr auto kNames<Precision> = enum_names<Precision>({{Precision::kBf16, "bf16"},
                                                                 {Precision::kFp8, "fp8"},
                                                                 {Precision::kAuto, "auto"}});

// What the factors of a linear layer's three products are rounded to.
struct LinearTypes {
  DType inputs;     // of the forward product, and of the gradient of the weights
  DType weights;    // of the forward product, and of the gradient of the inputs
  DType gradients;  // of the outputs
  bool fp8() const { return is_fp8(inputs); }
};

struct PrecisionPolicy {
  DType weights;           // gathered copies that layers read, but for matrices in fp8
  DType activations;       // and the gradients of activations
  DType weight_gradients;  // what micro-batches add up
  DType state;             // master weights and what the optimizer keeps
  LinearTypes linear;      // of the blocks' linear layers; those of embedding and head stay as held
  std::string describe() const;
};

// `held` is the type of activations and gathered weights, Memory::compute_dtype(). With fp8, inputs
// and weights are e4m3 and gradients, whose sizes differ more, e5m2 (arXiv 2209.05433, section 3).
PrecisionPolicy precision_policy(Precision precision, DType held);

}  // namespace sbtrain
