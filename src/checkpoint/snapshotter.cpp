#include "checkpoint/snapshotter.h"

#include <algorithm>
#include <utility>

#include "core/host_memory.h"
#include "core/log.h"
#include "core/memory_check.h"
#include "ops/pinned_copy.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

constexpr size_t kAlignment = 256;  // bytes, as on the device
constexpr std::string_view kWhat = "the copy on the host that checkpoints are written from";

size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// What this rank saves: ranks that hold the same shard save a part of it each.
std::vector<TensorShard> saved_shards(const ShardedParams& params) {
  const Communicator* replicas = params.mesh().replicas();
  return tensor_shards(params, /*with_state=*/true, replicas ? replicas->rank() : 0,
                       replicas ? replicas->world() : 1);
}

}  // namespace

size_t Snapshotter::bytes_of(const ShardedParams& params) {
  size_t bytes = 0;
  for (const TensorShard& shard : saved_shards(params)) bytes += aligned(shard.stored.bytes());
  return bytes;
}

Snapshotter::Snapshotter(ShardedParams& params)
    : params_(params),
      stream_(params.stream().memory(), "snapshot"),
      copied_(std::make_shared<Event>()) {
  MemoryReport copy;
  for (const TensorShard& shard : saved_shards(params_)) {
    const size_t bytes = aligned(shard.stored.bytes());
    offsets_.push_back(bytes_);
    bytes_ += bytes;
    const bool weights = shard.kind == kModelKind;
    copy.persistent[static_cast<int>(weights ? MemoryClass::kWeights : MemoryClass::kOptimizer)] +=
        bytes;
  }
  require_memory(Backend::kCpu, copy, kWhat,
                 "Leave more of the host's memory free, or train on more hosts.");
  if (params.stream().backend() != Backend::kCuda || bytes_ == 0) return;
  log_info("saving takes {:.2f} GiB of the host's memory, page-locked", gibibytes(bytes_));
  coming_ = std::async(std::launch::async, [this] { return make_memory(); });
}

Snapshotter::~Snapshotter() {
  if (coming_.valid()) coming_.wait();
  try {
    copied_->synchronize();
  } catch (const std::exception& e) {
    log_error("{}", e.what());
  }
}

std::shared_ptr<PinnedMemory> Snapshotter::make_memory() const {
  auto memory = std::make_shared<PinnedMemory>(params_.stream().backend(), bytes_, kWhat);
  if (!memory->refused().empty()) {
    log_warning(
        "the system refused to lock {:.2f} GiB of the host's memory ({}): training waits while a "
        "checkpoint is copied. Raise the limit of locked memory (ulimit -l)",
        gibibytes(bytes_), memory->refused());
  }
  return memory;
}

void Snapshotter::begin(Snapshot& snapshot) {
  if (coming_.valid()) memory_ = coming_.get();
  if (!memory_) memory_ = make_memory();
  snapshot.tensors = saved_shards(params_);
  params_.stream().record(ready_);
  stream_.wait(ready_);
  for (size_t i = 0; i < snapshot.tensors.size(); ++i) {
    Tensor& stored = snapshot.tensors[i].stored;
    ops::copy_to_pinned(stream_, *memory_, offsets_[i], stored);
    stored.data = memory_->data() + offsets_[i];
  }
  stream_.record(*copied_);
  snapshot.memory = memory_;
  snapshot.wait = [copied = copied_] { copied->synchronize(); };
}

}  // namespace sbtrain
