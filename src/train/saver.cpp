#include "train/saver.h"

#include <utility>

#include "checkpoint/checkpoint.h"
#include "core/error.h"

namespace sbtrain {

Saver::Saver(const std::filesystem::path& run, const ResolvedConfig& resolved, Control& control,
             const SavedState& continued)
    : resolved_(resolved),
      writer_({.run = run,
               .keep = resolved.config.checkpoint.keep,
               .max_failures = resolved.config.checkpoint.max_failures,
               .async = resolved.config.checkpoint.async,
               .group = make_rank_group(control)}),
      saved_(continued) {}

const Event& Saver::copy_from(ShardedParams& params) {
  snapshotter_.emplace(params);
  return snapshotter_->copied();
}

void Saver::save(const RunState& state, std::function<void()> before_commit) {
  Snapshot snapshot = writer_.take_buffers();
  if (writer_.last().saved && writer_.last().step == saving_.step) saved_ = saving_;
  // Applied steps since the last checkpoint began from its weights and had finite gradients.
  const bool proven = saved_.step >= 0 && state.updates > saved_.updates;
  saving_ = {.step = state.step,
             .updates = state.updates,
             .last_good = proven ? saved_.step : saved_.last_good};
  snapshotter_->begin(snapshot);
  snapshot.last_good = saving_.last_good;
  snapshot.step = state.step;
  snapshot.tokens = state.tokens;
  snapshot.state_json = format_run_state(state);
  snapshot.config_yaml = resolved_.yaml;
  snapshot.fingerprints = identity_fields(resolved_.fields);
  snapshot.before_commit = std::move(before_commit);
  writer_.save(std::move(snapshot));
  saved_step_ = state.step;
}

void Saver::finish() {
  if (writer_.wait() || writer_.last().step != saved_step_) return;
  fail(ExitCode::kStorage, "the last checkpoint could not be saved: {}", writer_.last().error);
}

}  // namespace sbtrain
