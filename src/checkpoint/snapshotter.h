// The copy of a rank's weights and moments that checkpoints are written from, made beside training.
#pragma once

#include <future>
#include <memory>

#include "checkpoint/checkpoint.h"
#include "core/event.h"
#include "core/pinned_memory.h"
#include "core/stream.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// On a GPU the copy is made by a stream of its own while the next step's forward and backward pass
// run, which read only the compute copies of the weights: just the update, which changes what is
// copied, waits. It needs as much of the host's memory as the rank's weights and state take (12
// bytes with AdamW for each parameter that it saves), page-locked; that memory is taken once and
// used for every save. On the CPU begin() copies with all threads and returns when it is done.
//
// Usage: begin(snapshot) after a step; stream.wait(copied()) before the next update; the snapshot's
// `wait` tells the thread that writes it when the values are there. The snapshot before must be
// written before begin() is called again.
class Snapshotter {
 public:
  // `params` must outlive this. On a GPU the memory is made in the background from now on. Throws
  // ExitCode::kOutOfMemory if the host has less memory free than it needs.
  explicit Snapshotter(ShardedParams& params);
  // Waits for a copy that still runs.
  ~Snapshotter();
  Snapshotter(const Snapshotter&) = delete;
  Snapshotter& operator=(const Snapshotter&) = delete;

  // The bytes of the host's memory that this takes.
  size_t bytes() const { return bytes_; }
  static size_t bytes_of(const ShardedParams& params);

  // Starts to copy this rank's ranges of all weights and moments as the work given to the params'
  // stream until now leaves them, and fills the snapshot's tensors, memory and wait.
  void begin(Snapshot& snapshot);

  // Done when what begin() has started to copy may be changed again.
  const Event& copied() const { return *copied_; }

 private:
  std::shared_ptr<PinnedMemory> make_memory() const;

  ShardedParams& params_;
  Stream stream_;
  Event ready_;                    // the state to copy is there
  std::shared_ptr<Event> copied_;  // the thread that writes waits for it too
  std::vector<size_t> offsets_;    // of each tensor in the memory
  size_t bytes_ = 0;
  std::future<std::shared_ptr<PinnedMemory>> coming_;
  std::shared_ptr<PinnedMemory> memory_;
};

}  // namespace sbtrain
