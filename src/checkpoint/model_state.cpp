#include "checkpoint/model_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "checkpoint/stored_runs.h"
#include "checkpoint/weight_match.h"
#include "checkpoint/workers.h"
#include "core/error.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

constexpr int64_t kPartElements = int64_t{1} << 21;  // 8 MiB, which a thread reads at a time

// Checkpoints hold no padding, but products read it: it must be zero, as initialize() leaves it.
void clear(ShardedParams& params, bool with_state) {
  for (size_t u = 0; u < params.registry().units().size(); ++u) {
    const ShardedParams::Shard& shard = params.shard(static_cast<int>(u));
    ops::run(params.stream(), ops::Fill{.x = shard.weights, .value = 0.0f});
    if (!with_state) continue;
    if (shard.average.defined()) {
      ops::run(params.stream(), ops::Fill{.x = shard.average, .value = 0.0f});
    }
    for (const StateRange& range : shard.ranges) {
      for (const Tensor& state : range.states) {
        ops::run(params.stream(), ops::Fill{.x = state, .value = 0.0f});
      }
    }
  }
}

// Whether the host can read and write the values in place.
bool on_host(const ShardedParams& params) {
  return params.stream().backend() != Backend::kCuda;
}

// Throws unless the checkpoint has the tensor in the model's shape.
void check_fits(const CheckpointReader& checkpoint, const TensorShard& shard) {
  const auto refuse = [&](const std::string& why) {
    fail(ExitCode::kNoCheckpoint,
         "{}: {}/{} {}; the checkpoint belongs to another model, see `sbtrain config show`",
         checkpoint.folder().string(), shard.kind, shard.name, why);
  };
  if (!checkpoint.has(shard.kind, shard.name)) refuse("is missing");
  const std::vector<int64_t>& saved = checkpoint.shape(shard.kind, shard.name);
  if (saved == shard.shape) return;
  refuse(fmt::format("has shape [{}] where the model has [{}]", fmt::join(saved, ", "),
                     fmt::join(shard.shape, ", ")));
}

// Fills shards in the host's memory.
using ReadShards = std::function<void(const std::vector<TensorShard>&)>;

// Reads groups of shards with all threads, and uploads each group. A group is large enough to keep
// the threads busy, and a small part of the host's memory.
void load_through_host(const ReadShards& read, const std::vector<TensorShard>& shards,
                       Stream& stream) {
  constexpr int64_t kGroupElements = int64_t{1} << 27;  // 512 MiB
  std::vector<float> host;
  for (size_t begin = 0; begin < shards.size();) {
    size_t end = begin;
    int64_t elements = 0;
    for (; end < shards.size(); ++end) {
      const int64_t more = shards[end].stored.numel();
      if (end > begin && elements + more > kGroupElements) break;
      elements += more;
    }
    host.assign(static_cast<size_t>(elements), 0.0f);  // zero where rows are padded
    std::vector<TensorShard> group(shards.begin() + static_cast<int64_t>(begin),
                                   shards.begin() + static_cast<int64_t>(end));
    float* at = host.data();
    for (TensorShard& shard : group) {
      shard.stored = Tensor(at, DType::kF32, {shard.stored.numel()});
      at += shard.stored.numel();
    }
    read(group);
    for (size_t i = begin; i < end; ++i) {
      upload(stream, shards[i].stored, group[i - begin].stored.f32());
    }
    begin = end;
  }
}

void load_into(const std::vector<TensorShard>& shards, ShardedParams& params,
               const ReadShards& read) {
  if (on_host(params)) {
    read(shards);
  } else {
    load_through_host(read, shards, params.stream());
  }
}

// Reads parts of shards, each with a thread of its own.
void read_parts(const WeightSource& source, const std::vector<TensorShard>& shards) {
  std::vector<std::pair<const TensorShard*, int64_t>> parts;
  for (const TensorShard& shard : shards) {
    for (int64_t at = shard.begin; at < shard.end; at += kPartElements)
      parts.emplace_back(&shard, at);
  }
  run_parallel(static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const TensorShard* shard = parts[static_cast<size_t>(i)].first;
    const int64_t begin = parts[static_cast<size_t>(i)].second;
    const int64_t end = std::min(begin + kPartElements, shard->end);
    thread_local std::vector<float> values;
    values.resize(static_cast<size_t>(kPartElements));
    read_finite(source, shard->name, begin, end, values.data());
    for_each_stored_run(*shard, begin, end, [&](int64_t logical, int64_t stored, int64_t count) {
      std::copy_n(values.data() + logical, count, shard->stored.f32() + stored);
    });
  });
}

}  // namespace

void load_weights(const WeightSource& source, ShardedParams& params) {
  std::vector<TensorShard> shards;
  for (TensorShard& shard : tensor_shards(params, /*with_state=*/false)) {
    if (source.has(shard.name)) shards.push_back(std::move(shard));
  }
  load_into(shards, params, [&](const auto& group) { read_parts(source, group); });
}

void verify_weights(const CheckpointReader& checkpoint) {
  std::vector<std::pair<std::string, int64_t>> parts;
  for (const std::string& name : checkpoint.names(kModelKind)) {
    const int64_t count = checked_numel(checkpoint.shape(kModelKind, name));
    for (int64_t at = 0; at < count; at += kPartElements) parts.emplace_back(name, at);
  }
  run_parallel(static_cast<int64_t>(parts.size()), [&](int64_t i) {
    const auto& [name, begin] = parts[static_cast<size_t>(i)];
    const int64_t count = checked_numel(checkpoint.shape(kModelKind, name));
    thread_local std::vector<float> values;
    values.resize(static_cast<size_t>(kPartElements));
    checkpoint.read(kModelKind, name, begin, std::min(begin + kPartElements, count), values.data());
  });
}

void check_resumable(const CheckpointReader& checkpoint) {
  if (checkpoint.kinds().size() > 1) return;
  fail(ExitCode::kNoCheckpoint,
       "{}: it has weights and no moments, as `sbtrain import` writes them; start a "
       "run in another "
       "folder from them: --init-from={}",
       checkpoint.folder().string(), checkpoint.folder().string());
}

namespace {

// Whether the shard's tensor may begin anew: the average of the weights, where none was kept, and
// the state of an optimizer that is not the checkpoint's.
bool begins_anew(const CheckpointReader& checkpoint, const TensorShard& shard, StateFrom from) {
  if (shard.kind == kModelKind) return false;
  if (shard.kind == kAverageKind) return checkpoint.names(kAverageKind).empty();
  return from == StateFrom::kAnotherOptimizer && !checkpoint.has(shard.kind, shard.name);
}

}  // namespace

std::set<std::string> load_shards(const CheckpointReader& checkpoint, ShardedParams& params,
                                  bool with_state, StateFrom from) {
  std::set<std::string> anew;
  std::vector<TensorShard> stored;
  for (TensorShard& shard : tensor_shards(params, with_state)) {
    if (begins_anew(checkpoint, shard, from)) {
      anew.insert(shard.kind);
      continue;
    }
    check_fits(checkpoint, shard);
    stored.push_back(std::move(shard));
  }
  clear(params, with_state);
  load_into(stored, params, [&](const auto& group) { checkpoint.read(group); });
  if (anew.contains(kAverageKind)) params.begin_average();
  return anew;
}

void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_state) {
  load_shards(checkpoint, params, with_state);
  params.refresh();
}

}  // namespace sbtrain
