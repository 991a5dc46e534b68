#include "parallel/param_shards.h"

#include <algorithm>

namespace sbtrain {
namespace {

// The storage element that holds logical element `element` of the tensor.
int64_t storage_of(const PlacedTensor& tensor, int64_t element) {
  const int64_t logical = tensor.spec.shape.back();
  const int64_t stored = tensor.spec.stored().back();
  return element / logical * stored + element % logical;
}

}  // namespace

std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_moments) {
  return tensor_shards(params, with_moments, 0, 1);
}

std::vector<TensorShard> tensor_shards(const ShardedParams& params, bool with_moments, int n,
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
      const auto add = [&](TensorKind kind, const Tensor& flat) {
        const TensorRange part{kind, tensor.name, tensor.spec.shape, range.begin, range.end};
        shards.push_back({part,
                          flat.row_range(tensor.offset + first - shard.begin, last + 1 - first),
                          padded ? tensor.spec.stored().back() : 0});
      };
      add(TensorKind::kModel, shard.weights);
      if (!with_moments) continue;
      add(TensorKind::kAdamM, shard.moment1);
      add(TensorKind::kAdamV, shard.moment2);
    }
  }
  return shards;
}

}  // namespace sbtrain
