// A range of a parameter's elements: the part of a tensor that a rank owns and a checkpoint stores.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sbtrain {

// The role of a tensor in the run is named by a word, which stands before the parameter's name in
// checkpoints: this one for the weights; the state of an optimizer has names of its own
// (Optimizer::states()).
inline constexpr const char* kModelKind = "model";
// The running average of the weights (train.ema).
inline constexpr const char* kAverageKind = "ema";

struct TensorRange {
  std::string kind = kModelKind;
  std::string name;
  std::vector<int64_t> shape;  // global, logical
  int64_t begin = 0;           // logical flat elements [begin, end)
  int64_t end = 0;
};

// A range in a rank's memory.
struct TensorShard : TensorRange {
  Tensor stored;  // flat, from element `begin` to the last; padding between rows included
  // If rows are stored padded, the elements from the start of one row (shape.back() logical
  // elements) to the next; 0: rows follow each other without padding.
  int64_t row_stride = 0;
};

}  // namespace sbtrain
