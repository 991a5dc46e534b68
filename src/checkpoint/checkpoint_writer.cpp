#include "checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace sbtrain {

CheckpointWriter::CheckpointWriter(Options options)
    : options_(std::move(options)), storage_(options_.io_hook) {
  options_.max_failures = std::max<int64_t>(options_.max_failures, 1);
  if (options_.group.rank == 0) clean_up_checkpoints(storage_, options_.run);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& e) {
    log_error("{}", e.what());
  }
}

Snapshot CheckpointWriter::take_buffers() {
  finish();
  return std::exchange(snapshot_, {});
}

void CheckpointWriter::save(Snapshot&& snapshot) {
  finish();
  snapshot_ = std::move(snapshot);
  const auto policy = options_.async ? std::launch::async : std::launch::deferred;
  running_ = std::async(policy, [this] { return run_save(); });
  if (!options_.async) finish();
}

bool CheckpointWriter::wait() {
  finish();
  return last_.saved;
}

bool CheckpointWriter::busy() const {
  return running_.valid() &&
         running_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

void CheckpointWriter::poll() {
  if (running_.valid() && !busy()) finish();
}

// Runs on the background thread. Storage errors become an outcome; all others reach the trainer.
CheckpointWriter::Outcome CheckpointWriter::run_save() const {
  Outcome outcome;
  outcome.step = snapshot_.step;
  const auto start = std::chrono::steady_clock::now();
  try {
    SavedCheckpoint saved =
        save_checkpoint(storage_, options_.run, snapshot_, options_.group, options_.keep);
    outcome.saved = true;
    outcome.folder = std::move(saved.folder);
    outcome.bytes = saved.bytes;
  } catch (const Error& error) {
    if (error.code() != ExitCode::kStorage) throw;
    outcome.error = error.what();
    log_warning("the checkpoint of step {} was not saved: {}", outcome.step, error.what());
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (outcome.saved && options_.group.rank == 0) {
    log_info("saved {} ({:.1f} MB in {:.2f} s)", outcome.folder.string(),
             static_cast<double>(outcome.bytes) / 1e6, outcome.seconds);
  }
  return outcome;
}

void CheckpointWriter::finish() {
  if (!running_.valid()) return;
  last_ = running_.get();
  if (last_.saved) {
    failures_ = 0;
    return;
  }
  if (++failures_ >= options_.max_failures) {
    fail(ExitCode::kStorage, "{} checkpoints in a row could not be saved, the last because: {}",
         failures_, last_.error);
  }
}

}  // namespace sbtrain
