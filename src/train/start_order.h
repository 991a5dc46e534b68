// Where a start of a run begins, and what the same command continues when it is started again.
//
// checkpoint.resume: auto continues with the newest checkpoint. Any other value is an order to
// begin elsewhere, which a start obeys once: <run>/start.json notes the configuration of the
// command and how many saves there were before. The same command, started again after a stop, a
// crash or a kill, goes on with the newest checkpoint that was saved since; so a job that a
// scheduler puts back into its queue makes progress, whose command is always the same. A command of
// another configuration, and any start after the run was completed or has diverged, obeys its order
// anew.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"

namespace sbtrain {

class StartOrder {
 public:
  // `resume` is checkpoint.resume, `config_yaml` the resolved configuration of the command. Only
  // the holder of the run's lock may use the object.
  StartOrder(std::filesystem::path run, std::string resume, const std::string& config_yaml);

  // What to begin from, for resume_checkpoint.
  std::string resume();
  // Notes the order that resume() has obeyed. To be called before the first save.
  void note() const;
  // The run is complete, or has failed by itself: the order counts for the next start again.
  void forget() const;

 private:
  std::filesystem::path file() const { return run_ / "start.json"; }
  std::optional<int64_t> noted() const;

  std::filesystem::path run_;
  std::string order_;     // checkpoint.resume
  std::string config_;    // SHA-256 of the configuration
  bool obeyed_ = true;    // by this start, not by an earlier one of the same command
  int64_t sequence_ = 0;  // of the last save before this start
};

}  // namespace sbtrain
