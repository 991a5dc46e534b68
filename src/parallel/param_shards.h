// A rank's parameters as the ranges of logical tensors that checkpoints store.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parallel/sharded_params.h"

namespace sbtrain {

enum class ParamState : uint8_t { kMaster, kMoment1, kMoment2 };

// This rank's part of one tensor, in the memory of its device.
struct ParamRange {
  ParamState state = ParamState::kMaster;
  std::string name;
  std::vector<int64_t> shape;  // global, logical
  int64_t begin = 0;           // logical flat elements [begin, end)
  int64_t end = 0;
  float* data = nullptr;   // element `begin`
  int64_t row_stride = 0;  // elements between rows where they are stored padded, else 0
};

// Every part that this rank owns, in the registry's order; with_moments adds AdamW's.
std::vector<ParamRange> param_ranges(const ShardedParams& params, bool with_moments);

}  // namespace sbtrain
