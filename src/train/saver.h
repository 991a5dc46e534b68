// The checkpoints that a run saves while it trains.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/snapshotter.h"
#include "job/control.h"
#include "train/run_state.h"
#include "train/trainer.h"

namespace sbtrain {

// A checkpoint of the run that a later one continues.
struct SavedState {
  int64_t step = -1;
  int64_t updates = 0;     // applied until there
  int64_t last_good = -1;  // the newest step whose weights are known to be good (Manifest)
};

// Copies the state of a run and writes it in the background. Every rank has one and makes the same
// calls. They throw as those of CheckpointWriter do.
class Saver {
 public:
  // `resolved` must outlive this. `continued` is where the run goes on, if from a checkpoint of its
  // own.
  Saver(const std::filesystem::path& run, const ResolvedConfig& resolved, Control& control,
        const SavedState& continued);

  // Takes the memory for copies of the params, which must outlive this; before the first save().
  // Returns what the next update has to wait for.
  const Event& copy_from(ShardedParams& params);

  // The step whose state a checkpoint has, and which needs no save; -1: none.
  int64_t saved_step() const { return saved_step_; }
  void set_saved_step(int64_t step) { saved_step_ = step; }

  // Waits for the save before, and starts one of the state as all steps given to the params' stream
  // leave it. `before_commit` is called by the thread that writes, before the checkpoint counts.
  void save(const RunState& state, std::function<void()> before_commit);

  // Notes how a save has ended, without waiting.
  void poll() { writer_.poll(); }

  // Waits for the last save. Throws ExitCode::kStorage if it has failed.
  void finish();

 private:
  const ResolvedConfig& resolved_;
  CheckpointWriter writer_;
  std::optional<Snapshotter> snapshotter_;
  int64_t saved_step_ = -1;
  SavedState saved_;   // on disk
  SavedState saving_;  // by the writer, which may fail
};

}  // namespace sbtrain
