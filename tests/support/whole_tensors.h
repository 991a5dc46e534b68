// What ranks hold of a model's tensors and of its optimizer's state, put together.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/stored_runs.h"
#include "parallel/param_shards.h"

namespace sbtrain::test {

using WholeTensors = std::map<std::string, std::vector<float>>;  // by kind and name

// Adds what one rank holds. Replicas must hold the same bits. One rank at a time may call it.
inline void add_tensors_of_rank(WholeTensors& tensors, const ShardedParams& params) {
  for (const TensorShard& part : tensor_shards(params, /*with_state=*/true)) {
    std::vector<float>& whole = tensors[fmt::format("{} {}", part.kind, part.name)];
    int64_t count = 1;
    for (const int64_t n : part.shape) count *= n;
    whole.resize(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
    const auto keep = [&](int64_t logical, int64_t stored, int64_t count_here) {
      for (int64_t i = 0; i < count_here; ++i) {
        const float value = part.stored.f32()[stored + i];
        float& kept = whole[part.begin + logical + i];
        if (!std::isnan(kept)) {
          EXPECT_EQ(kept, value) << part.name;
        }
        kept = value;
      }
    };
    for_each_stored_run(part, part.begin, part.end, keep);
  }
}

}  // namespace sbtrain::test
