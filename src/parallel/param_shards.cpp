#include "parallel/param_shards.h"

#include <algorithm>

namespace sbtrain {
namespace {

// Storage element at which logical element `element` of the tensor lies.
int64_t storage_of(const PlacedTensor& tensor, int64_t element) {
  const int64_t logical = tensor.spec.shape.back();
  const int64_t stored = tensor.spec.stored().back();
  return element / logical * stored + element % logical;
}

}  // namespace

std::vector<ParamRange> param_ranges(const ShardedParams& params, bool with_moments) {
  std::vector<ParamRange> ranges;
  const ParamRegistry& registry = params.registry();
  for (size_t u = 0; u < registry.units().size(); ++u) {
    const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
    for (const PlacedTensor& tensor : registry.units()[u].tensors) {
      const LogicalRange range = logical_range(tensor, shard.begin - tensor.offset,
                                               shard.begin + shard.size - tensor.offset);
      if (range.begin == range.end) continue;
      const bool padded = tensor.spec.shape.back() != tensor.spec.stored().back();
      const int64_t first = tensor.offset + storage_of(tensor, range.begin) - shard.begin;
      const auto add = [&](ParamState state, const Tensor& flat) {
        ranges.push_back({.state = state,
                          .name = tensor.name,
                          .shape = tensor.spec.shape,
                          .begin = range.begin,
                          .end = range.end,
                          .data = flat.f32() + first,
                          .row_stride = padded ? tensor.spec.stored().back() : 0});
      };
      add(ParamState::kMaster, shard.master);
      if (!with_moments) continue;
      add(ParamState::kMoment1, shard.moment1);
      add(ParamState::kMoment2, shard.moment2);
    }
  }
  return ranges;
}

}  // namespace sbtrain
