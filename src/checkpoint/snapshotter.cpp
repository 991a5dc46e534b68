#include "checkpoint/snapshotter.h"

#include <algorithm>
#include <utility>

#include "core/host_memory.h"
#include "core/log.h"
#include "core/memory_check.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

constexpr size_t kAlignment = 256;  // bytes, as on the device

// Copies x to `offset` of the memory, in parts that do not cross its pieces.
void start_copy(Stream& s, const PinnedMemory& memory, size_t offset, const Tensor& x) {
  const size_t element = dtype_size(x.dtype);
  for (int64_t at = 0; at < x.numel();) {
    const size_t begin = offset + static_cast<size_t>(at) * element;
    const size_t left = PinnedMemory::kPiece - begin % PinnedMemory::kPiece;
    const int64_t count = std::min(x.numel() - at, static_cast<int64_t>(left / element));
    ops::run(s, ops::StartCopyToHost{.host = memory.data() + begin, .x = x.row_range(at, count)});
    at += count;
  }
}

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
  require_memory(Backend::kCpu, copy, "the copy on the host that checkpoints are written from",
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
  auto memory = std::make_shared<PinnedMemory>(params_.stream().backend(), bytes_);
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
    start_copy(stream_, *memory_, offsets_[i], stored);
    stored.data = memory_->data() + offsets_[i];
  }
  stream_.record(*copied_);
  snapshot.memory = memory_;
  snapshot.wait = [copied = copied_] { copied->synchronize(); };
}

}  // namespace sbtrain
