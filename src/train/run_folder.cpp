#include "train/run_folder.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "core/host_name.h"
#include "core/log.h"
#include "core/version.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "config.yaml";
constexpr const char* kInfoFile = "run.json";
constexpr const char* kStatusFile = "status.json";

std::string_view state_name(RunStatus::State state) {
  switch (state) {
    case RunStatus::State::kRunning:
      return "running";
    case RunStatus::State::kComplete:
      return "complete";
    case RunStatus::State::kStopped:
      return "stopped";
    case RunStatus::State::kFailed:
      return "failed";
  }
  return "";
}

// Writes a file of the run folder. A file of an earlier start that differs is kept under another
// name.
void write_run_file(const fs::path& file, const std::string& text) {
  const std::string before = text_of_run_file(file);
  if (before == text) return;
  if (!before.empty()) {
    log_info("{} differs from that of an earlier start, which is kept as {}", file.string(),
             set_aside(file).string());
  }
  replace_file(file, text, {}, MissingFolders::kError);
}

}  // namespace

std::string text_of_run_file(const fs::path& file) {
  std::error_code unreadable;
  return fs::exists(file, unreadable) ? read_input(file, ExitCode::kStorage) : "";
}

void check_run_folder(const fs::path& run, const std::string& config_yaml) {
  const fs::path config = run / kConfigFile;
  if (fs::exists(run / kInfoFile) || !fs::exists(config)) return;
  if (text_of_run_file(config) == config_yaml) return;
  fail(ExitCode::kUsage,
       "{} was not written by a run, and the resolved configuration would replace it: keep it "
       "outside of the run folder, or choose another folder (out)",
       config.string());
}

void describe_run_folder(const fs::path& run, const std::string& config_yaml,
                         const std::string& tokenizer) {
  const nlohmann::json info = {{"version", version()},
                               {"git_revision", git_revision()},
                               {"host", host_name()},
                               {"started", std::chrono::duration_cast<std::chrono::seconds>(
                                               std::chrono::system_clock::now().time_since_epoch())
                                               .count()}};
  replace_file(run / kInfoFile, info.dump(2) + "\n", {}, MissingFolders::kError);
  write_run_file(run / kConfigFile, config_yaml);
  if (tokenizer.empty()) return;
  const std::vector<TokenizerFile> files = tokenizer_files(tokenizer);
  const auto stays = [&](const fs::path& path) {
    return std::ranges::any_of(
        files, [&](const TokenizerFile& file) { return path.filename() == file.name; });
  };
  // Those of an earlier start with another kind of tokenizer would be taken for this run's.
  if (const std::string earlier = find_tokenizer(run.string()); !earlier.empty()) {
    for (const TokenizerFile& file : tokenizer_files(earlier)) {
      if (!stays(file.path)) set_aside(file.path);
    }
  }
  for (const TokenizerFile& file : files) {
    write_run_file(run / file.name, read_input(file.path, ExitCode::kData));
  }
}

void write_run_status(const fs::path& run, const RunStatus& status) {
  nlohmann::ordered_json text = {{"state", state_name(status.state)}};
  if (status.state != RunStatus::State::kRunning) {
    text["exit_code"] = static_cast<int>(status.exit_code);
  }
  if (!status.message.empty()) text["message"] = status.message;
  // A message may hold the bytes of a path, which need not be UTF-8.
  const auto replace = nlohmann::json::error_handler_t::replace;
  replace_file(run / kStatusFile, text.dump(2, ' ', false, replace) + "\n", {},
               MissingFolders::kError);
}

}  // namespace sbtrain
