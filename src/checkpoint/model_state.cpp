#include "checkpoint/model_state.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

// Checkpoints hold no padding, but products read it: it must be zero, as initialize() leaves it.
void clear(ShardedParams& params, bool with_moments) {
  for (size_t u = 0; u < params.registry().units().size(); ++u) {
    const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
    ops::run(params.stream(), ops::Fill{.x = shard.weights, .value = 0.0f});
    if (!with_moments) continue;
    ops::run(params.stream(), ops::Fill{.x = shard.moment1, .value = 0.0f});
    ops::run(params.stream(), ops::Fill{.x = shard.moment2, .value = 0.0f});
  }
}

// Whether the host can read and write the values in place.
bool on_host(const ShardedParams& params) {
  return params.stream().backend() != Backend::kCuda;
}

}  // namespace

void take_snapshot(ShardedParams& params, Snapshot& snapshot) {
  const std::vector<TensorShard> shards = tensor_shards(params, /*with_moments=*/true);
  if (on_host(params)) {
    copy_tensors(shards, snapshot);
    return;
  }
  snapshot.tensors.resize(shards.size());
  std::vector<float> host;
  for (size_t i = 0; i < shards.size(); ++i) {
    TensorShard shard = shards[i];
    host.resize(static_cast<size_t>(shard.stored.numel()));
    ops::run(params.stream(), ops::CopyToHost{.host = host.data(), .x = shard.stored});
    shard.stored.data = host.data();
    Snapshot one;
    one.tensors.push_back(std::move(snapshot.tensors[i]));  // reuses its memory
    copy_tensors(std::span(&shard, 1), one);
    snapshot.tensors[i] = std::move(one.tensors.front());
  }
}

void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_moments) {
  clear(params, with_moments);
  std::vector<float> host;
  for (const TensorShard& shard : tensor_shards(params, with_moments)) {
    const auto refuse = [&](const std::string& why) {
      fail(ExitCode::kNoCheckpoint,
           "{}: {}/{} {}; the checkpoint belongs to another model, see `sbtrain config show`",
           checkpoint.folder().string(), tensor_kind_name(shard.kind), shard.name, why);
    };
    if (!checkpoint.has(shard.kind, shard.name)) refuse("is missing");
    if (checkpoint.shape(shard.kind, shard.name) != shard.shape) {
      refuse(fmt::format("has shape [{}] where the model has [{}]",
                         fmt::join(checkpoint.shape(shard.kind, shard.name), ", "),
                         fmt::join(shard.shape, ", ")));
    }
    if (on_host(params)) {
      checkpoint.read(shard.kind, shard.name, shard.begin, shard.end, shard.stored.f32(),
                      shard.row_stride);
      continue;
    }
    host.assign(static_cast<size_t>(shard.stored.numel()), 0.0f);
    checkpoint.read(shard.kind, shard.name, shard.begin, shard.end, host.data(), shard.row_stride);
    upload(params.stream(), shard.stored, host.data());
  }
  params.refresh();
}

}  // namespace sbtrain
