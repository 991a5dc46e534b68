// Saves checkpoints in the background, so that training waits only for the copy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <future>
#include <string>

#include "checkpoint/checkpoint.h"

namespace sbtrain {

// Usage, on every rank:
//   Snapshot snapshot = writer.take_buffers();   // waits for the previous save, if it still runs
//   take_snapshot(params, snapshot);
//   snapshot.step = ...;                         // and the other fields
//   writer.save(std::move(snapshot));            // returns at once if async
// At most one save runs at a time. A save that fails (disk full, I/O error) is logged and
// counted, and training may continue: the earlier checkpoints are whole.
class CheckpointWriter {
 public:
  struct Options {
    std::filesystem::path run;
    int64_t keep = 3;          // newest checkpoints kept
    int64_t max_failures = 3;  // failed saves in a row before ExitCode::kStorage is thrown
    bool async = true;
    RankGroup group{};
    IoHook io_hook{};  // tests
  };

  struct Outcome {
    int64_t step = -1;  // of the last finished save; -1: none yet
    bool saved = false;
    std::filesystem::path folder;
    uint64_t bytes = 0;
    double seconds = 0;
    std::string error;
  };

  // On rank 0 it removes what a crash has left, so the caller must hold the run's lock (RunLock).
  explicit CheckpointWriter(Options options);
  // Waits for a running save, whose failure is only logged.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Waits for the previous save and returns its snapshot, to be filled again.
  Snapshot take_buffers();
  void save(Snapshot&& snapshot);

  // Waits until no save runs; true if the last one is on disk. To be checked before exiting.
  bool wait();
  bool busy() const;
  // Notes the outcome of a finished save without waiting; cheap enough for every step.
  void poll();
  const Outcome& last() const { return last_; }

  // save, wait, poll and take_buffers throw ExitCode::kStorage once `max_failures` saves in a row
  // have failed, and at once any other error of the background save (a lost rank).

 private:
  Outcome run_save() const;
  void finish();

  Options options_;
  Storage storage_;
  Snapshot snapshot_;  // belongs to the background thread while running_ is valid
  std::future<Outcome> running_;
  Outcome last_;
  int64_t failures_ = 0;  // in a row
};

}  // namespace sbtrain
