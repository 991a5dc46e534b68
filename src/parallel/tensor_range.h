// A range of a parameter's elements: what a rank owns of a tensor, and what a checkpoint stores.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sbtrain {

// What a tensor is to the run.
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
  // Elements from one row (shape.back() logical elements) to the next where rows are stored
  // padded; 0: they follow each other.
  int64_t row_stride = 0;
};

}  // namespace sbtrain
