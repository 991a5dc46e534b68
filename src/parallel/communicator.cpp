#include "parallel/communicator.h"

#include "core/error.h"
#include "ops/stream_control.h"

namespace sbtrain {
namespace {

void check_contiguous(const char* what, const Tensor& x) {
  if (x.defined() && x.contiguous()) return;
  fail(ExitCode::kInternal, "{}: {} (row stride {}) is not contiguous", what, x.describe(),
       x.row_stride);
}

void check_parts(const char* what, const Tensor& full, const Tensor& shard, int world) {
  check_contiguous(what, full);
  check_contiguous(what, shard);
  if (full.dtype == shard.dtype && full.numel() == shard.numel() * world) return;
  fail(ExitCode::kInternal, "{}: {} is not {} times {}", what, full.describe(), world,
       shard.describe());
}

void check_summed(const char* what, const Tensor& x) {
  if (x.dtype != DType::kU8) return;
  fail(ExitCode::kInternal, "{}: sums of {} are not supported", what, x.describe());
}

}  // namespace

const char* collective_name(Collective c) {
  constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce",
                                    "broadcast",  "all_to_all",     "shift"};
  return kNames[static_cast<int>(c)];
}

void Communicator::all_gather(Stream& s, Tensor full, Tensor shard) {
  check_parts("all_gather", full, shard, world());
  if (s.planning()) return plan(Collective::kAllGather, full);
  ops::timed(s, "all_gather", [&] { run_all_gather(s, full, shard); });
}

void Communicator::reduce_scatter(Stream& s, Tensor shard, Tensor full) {
  check_parts("reduce_scatter", full, shard, world());
  check_summed("reduce_scatter", full);
  if (s.planning()) return plan(Collective::kReduceScatter, full);
  ops::timed(s, "reduce_scatter", [&] { run_reduce_scatter(s, shard, full); });
}

void Communicator::all_to_all(Stream& s, Tensor to, Tensor from) {
  check_contiguous("all_to_all", to);
  check_contiguous("all_to_all", from);
  if (to.dtype != from.dtype || to.numel() != from.numel() || to.numel() % world() != 0) {
    fail(ExitCode::kInternal, "all_to_all: {} and {} are not the parts of {} ranks", to.describe(),
         from.describe(), world());
  }
  if (s.planning()) return plan(Collective::kAllToAll, from);
  ops::timed(s, "all_to_all", [&] { run_all_to_all(s, to, from); });
}

void Communicator::shift(Stream& s, Tensor to, Tensor from, int step) {
  check_contiguous("shift", to);
  check_contiguous("shift", from);
  if (to.dtype != from.dtype || to.numel() != from.numel()) {
    fail(ExitCode::kInternal, "shift: {} cannot receive {}", to.describe(), from.describe());
  }
  if (s.planning()) return plan(Collective::kShift, from);
  const int by = ((step % world()) + world()) % world();
  const Neighbours ring{.target = (rank() + by) % world(),
                        .source = (rank() + world() - by) % world()};
  ops::timed(s, "shift", [&] { run_shift(s, to, from, ring); });
}

void Communicator::all_reduce(Stream& s, Tensor x) {
  check_contiguous("all_reduce", x);
  check_summed("all_reduce", x);
  if (s.planning()) return plan(Collective::kAllReduce, x);
  ops::timed(s, "all_reduce", [&] { run_all_reduce(s, x); });
}

void Communicator::broadcast(Stream& s, Tensor x, int root) {
  check_contiguous("broadcast", x);
  require(root >= 0 && root < world(), "broadcast: no rank {} among {}", root, world());
  if (s.planning()) return plan(Collective::kBroadcast, x);
  ops::timed(s, "broadcast", [&] { run_broadcast(s, x, root); });
}

}  // namespace sbtrain
