#include "checkpoint/model_state.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

TensorKind kind_of(ParamState state) {
  switch (state) {
    case ParamState::kMaster:
      return TensorKind::kModel;
    case ParamState::kMoment1:
      return TensorKind::kAdamM;
    case ParamState::kMoment2:
      return TensorKind::kAdamV;
  }
  return TensorKind::kModel;
}

std::vector<TensorShard> training_state(const ShardedParams& params) {
  std::vector<TensorShard> shards;
  for (const ParamRange& range : param_ranges(params, /*with_moments=*/true)) {
    shards.push_back({.kind = kind_of(range.state),
                      .name = range.name,
                      .shape = range.shape,
                      .begin = range.begin,
                      .end = range.end,
                      .data = range.data,
                      .row_stride = range.row_stride});
  }
  return shards;
}

// Elements in memory from the range's first to its last, the padding between rows included.
template <typename Range>
int64_t stored_count(const Range& range) {
  const int64_t count = range.end - range.begin;
  const int64_t cols = range.shape.empty() ? 1 : range.shape.back();
  if (range.row_stride == 0 || count == 0) return count;
  return count + ((range.end - 1) / cols - range.begin / cols) * (range.row_stride - cols);
}

// Checkpoints hold no padding: it must be zero, as initialize() leaves it, since products read it.
void clear(ShardedParams& params, bool with_moments) {
  for (size_t u = 0; u < params.registry().units().size(); ++u) {
    const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
    ops::run(params.stream(), ops::Fill{.x = shard.master, .value = 0.0f});
    if (!with_moments) continue;
    ops::run(params.stream(), ops::Fill{.x = shard.moment1, .value = 0.0f});
    ops::run(params.stream(), ops::Fill{.x = shard.moment2, .value = 0.0f});
  }
}

bool on_host(const ShardedParams& params) {
  return params.stream().backend() != Backend::kCuda;
}

}  // namespace

void take_snapshot(ShardedParams& params, Snapshot& snapshot) {
  const std::vector<TensorShard> shards = training_state(params);
  if (on_host(params)) {
    copy_tensors(shards, snapshot);
    return;
  }
  snapshot.tensors.resize(shards.size());
  std::vector<float> host;
  for (size_t i = 0; i < shards.size(); ++i) {
    host.resize(static_cast<size_t>(stored_count(shards[i])));
    const Tensor device(const_cast<float*>(shards[i].data), DType::kF32, {stored_count(shards[i])});
    ops::run(params.stream(), ops::CopyToHost{.host = host.data(), .x = device});
    TensorShard shard = shards[i];
    shard.data = host.data();
    Snapshot one;
    one.tensors.push_back(std::move(snapshot.tensors[i]));  // its memory is used again
    copy_tensors(std::span(&shard, 1), one);
    snapshot.tensors[i] = std::move(one.tensors.front());
  }
}

void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_moments) {
  clear(params, with_moments);
  std::vector<float> host;
  for (const ParamRange& range : param_ranges(params, with_moments)) {
    const TensorKind kind = kind_of(range.state);
    const auto refuse = [&](const std::string& why) {
      fail(ExitCode::kNoCheckpoint,
           "{}: {}/{} {}; the checkpoint belongs to another model, see `sbtrain config show`",
           checkpoint.folder().string(), tensor_kind_name(kind), range.name, why);
    };
    if (!checkpoint.has(kind, range.name)) refuse("is missing");
    if (checkpoint.shape(kind, range.name) != range.shape) {
      refuse(fmt::format("has shape [{}] where the model has [{}]",
                         fmt::join(checkpoint.shape(kind, range.name), ", "),
                         fmt::join(range.shape, ", ")));
    }
    if (on_host(params)) {
      checkpoint.read(kind, range.name, range.begin, range.end, range.data, range.row_stride);
      continue;
    }
    host.assign(static_cast<size_t>(stored_count(range)), 0.0f);
    checkpoint.read(kind, range.name, range.begin, range.end, host.data(), range.row_stride);
    ops::run(params.stream(),
             ops::CopyFromHost{.y = Tensor(range.data, DType::kF32, {stored_count(range)}),
                               .host = host.data()});
  }
  params.refresh();
}

}  // namespace sbtrain
