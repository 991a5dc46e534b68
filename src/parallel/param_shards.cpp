#include "parallel/param_shards.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {
namespace {

// The storage element that holds logical element `element` of the tensor.
int64_t storage_of(const PlacedTensor& tensor, int64_t element) {
  const int64_t logical = tensor.spec.shape.back();
  const int64_t stored = tensor.spec.stored().back();
  return element / logical * stored + element % logical;
}

// The range that holds an element of the shard.
const StateRange& range_of(const ShardedParams::Shard& shard, int64_t element) {
  const auto found = std::ranges::find_if(
      shard.ranges, [&](const StateRange& range) { return element < range.end(); });
  require(found != shard.ranges.end() && element >= found->begin,
          "no state range holds element {} of a shard", element);
  return *found;
}

}  // namespace

std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_state) {
  return tensor_shards(params, with_state, 0, 1);
}

std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_state, int n,
                                       int parts) {
  std::vector<TensorShard> shards;
  const ParamRegistry& registry = params.registry();
  for (size_t u = 0; u < registry.units().size(); ++u) {
    const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
    const int64_t begin = shard.begin + shard.size * n / parts;
    const int64_t end = shard.begin + shard.size * (n + 1) / parts;
    for (const PlacedTensor& tensor : registry.units()[u].tensors) {
      const LogicalRange range = logical_range(tensor, begin - tensor.offset, end - tensor.offset);
      if (range.begin == range.end) continue;
      const bool padded = tensor.spec.shape.back() != tensor.spec.stored().back();
      const int64_t first = storage_of(tensor, range.begin);
      const int64_t last = storage_of(tensor, range.end - 1);
      const int64_t at = tensor.offset + first - shard.begin;
      // `flat` begins with element `origin` of the shard.
      const auto add = [&](const std::string& kind, const Tensor& flat, int64_t origin) {
        const TensorRange part{kind, tensor.name, tensor.spec.shape, range.begin, range.end};
        shards.push_back({part, flat.row_range(at - origin, last + 1 - first),
                          padded ? tensor.spec.stored().back() : 0});
      };
      add(kModelKind, shard.weights, 0);
      if (!with_state) continue;
      if (shard.average.defined()) add(kAverageKind, shard.average, 0);
      const StateRange& state = range_of(shard, at);
      for (size_t i = 0; i < state.names.size(); ++i) {
        add(state.names[i], state.states[i], state.begin);
      }
    }
  }
  return shards;
}

}  // namespace sbtrain
