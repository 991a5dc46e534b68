// The files of a run folder that say what the run is, beside its metrics and checkpoints.
#pragma once

#include <filesystem>
#include <string>

#include "core/error.h"

namespace sbtrain {

// The weights that the run has begun from, where they are not random.
inline constexpr const char* kInitFile = "init_from.json";

// The content, or nothing if there is no such file. Throws ExitCode::kStorage if it cannot be read.
std::string text_of_run_file(const std::filesystem::path& file);

// A folder that no run has used may hold a configuration that a user wrote, perhaps the one that
// this run has read. The resolved configuration must not replace it: throws ExitCode::kUsage.
void check_run_folder(const std::filesystem::path& run, const std::string& config_yaml);

// Records the configuration, the machine, the program and the tokenizer (a path, empty where the
// data are tasks), so that the model can be used with the run folder only. Files of an earlier
// start that differ are kept under other names.
void describe_run_folder(const std::filesystem::path& run, const std::string& config_yaml,
                         const std::string& tokenizer);

// What <run>/status.json says of the last start that trained, for programs that follow the run. A
// process that was killed leaves "running" there.
struct RunStatus {
  enum class State {
    kRunning,
    kComplete,
    kStopped,  // asked to, and saved
    kFailed
  };
  State state = State::kRunning;
  ExitCode exit_code = ExitCode::kDone;  // of stopped and failed runs
  std::string message;                   // the error of a failed run
};

// Throws ExitCode::kStorage.
void write_run_status(const std::filesystem::path& run, const RunStatus& status);

}  // namespace sbtrain
