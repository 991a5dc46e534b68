// A range of a parameter's elements: the part of a tensor that a rank owns and a checkpoint stores.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sbtrain {

// The role of a tensor in the run.
enum class TensorKind : uint8_t {
  kModel,  // weight
  kAdamM,  // AdamW first moment
  kAdamV,  // AdamW second moment
};

struct TensorRange {
  TensorKind kind = TensorKind::kModel;
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
