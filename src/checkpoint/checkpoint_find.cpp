#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "core/error.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

CheckpointInfo describe(const fs::path& folder, int64_t step) {
  CheckpointInfo info{folder, step, {}, ""};
  try {
    info.manifest = read_manifest(folder);
    if (info.manifest.step != step) {
      fail(ExitCode::kNoCheckpoint, "{}: this is the manifest of step {}",
           (folder / kManifestName).string(), info.manifest.step);
    }
  } catch (const Error& error) {
    info.problem = error.what();
  }
  return info;
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  const fs::path parent = checkpoints_of(run);
  const std::vector<std::string> names = names_in(parent);
  const std::set<std::string> present(names.begin(), names.end());
  std::vector<CheckpointInfo> list;
  std::vector<CheckpointInfo> refused;
  for (const std::string& name : names) {
    auto step = parse_step(name);
    if (!step) {  // set aside by an unfinished replacement: still the good one
      step = parse_step(name, kReplaced);
      if (!step || present.count(name.substr(0, name.size() - kReplaced.size())) != 0) continue;
    }
    CheckpointInfo info = describe(parent / name, *step);
    (info.problem.empty() ? list : refused).push_back(std::move(info));
  }
  // In the order of saving: after a return to an earlier step, higher steps may be older saves.
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) {
    return std::pair(a.manifest.sequence, a.step) > std::pair(b.manifest.sequence, b.step);
  });
  for (CheckpointInfo& info : refused) {  // their sequence is unknown: placed before lower steps
    const auto at = std::find_if(list.begin(), list.end(),
                                 [&](const auto& other) { return other.step < info.step; });
    list.insert(at, std::move(info));
  }
  return list;
}

std::string latest_text(const fs::path& run) {
  const InputFile file(checkpoints_of(run) / kLatest);
  std::string text(std::min<uint64_t>(file.size(), 64), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

std::string verify_latest(const fs::path& run) {
  const fs::path path = checkpoints_of(run) / kLatest;
  std::error_code unreadable;
  if (!fs::exists(path, unreadable) && !unreadable) return "";  // the first save was interrupted
  try {
    std::string text = latest_text(run);
    for (std::string before; text != before; before = std::exchange(text, latest_text(run))) {
      const std::vector<CheckpointInfo> list = list_checkpoints(run);
      const auto named = [&](const auto& info) { return text == step_name(info.step) + "\n"; };
      if (list.empty() || std::any_of(list.begin(), list.end(), named)) return "";
      // Where the run has just saved, `latest` has changed, and the list is read once more.
    }
    return fmt::format("{}: damaged: it does not name a checkpoint of this run", path.string());
  } catch (const Error& error) {
    return error.what();
  }
}

namespace {

// The first of `list` that is good; the reasons against the others.
std::optional<CheckpointReader> first_good(const std::vector<CheckpointInfo>& list,
                                           std::vector<std::string>& reasons) {
  for (const CheckpointInfo& info : list) {
    try {
      if (!info.problem.empty()) throw Error(ExitCode::kNoCheckpoint, info.problem);
      return CheckpointReader(info.folder);
    } catch (const Error& error) {
      std::error_code unreadable;
      const bool gone = !fs::exists(info.folder, unreadable);
      spdlog::warn("{} checkpoint {}: {}", gone ? "its run has removed" : "refusing",
                   info.folder.filename().string(), error.what());
      reasons.emplace_back(error.what());
    }
  }
  return std::nullopt;
}

// What changes when a run saves.
std::vector<std::pair<fs::path, int64_t>> saves_of(const std::vector<CheckpointInfo>& list) {
  std::vector<std::pair<fs::path, int64_t>> saves;
  for (const CheckpointInfo& info : list) saves.emplace_back(info.folder, info.manifest.sequence);
  return saves;
}

}  // namespace

std::optional<CheckpointReader> open_newest(const fs::path& run,
                                            std::vector<std::string>* refused) {
  if (const std::string problem = verify_latest(run); !problem.empty()) {
    spdlog::warn("{}; it is not needed to resume", problem);
    if (refused) refused->push_back(problem);
  }
  std::vector<CheckpointInfo> list = list_checkpoints(run);
  std::vector<std::string> reasons;
  for (;;) {
    reasons.clear();
    if (auto found = first_good(list, reasons)) {
      if (refused) refused->insert(refused->end(), reasons.begin(), reasons.end());
      return found;
    }
    // A run that saves removes its oldest checkpoint, perhaps the one that was being read; then
    // there is a newer one.
    std::vector<CheckpointInfo> now = list_checkpoints(run);
    if (saves_of(now) == saves_of(list)) break;
    list = std::move(now);
  }
  if (refused) refused->insert(refused->end(), reasons.begin(), reasons.end());
  if (reasons.empty()) return std::nullopt;
  fail(ExitCode::kNoCheckpoint,
       "{}: none of its {} checkpoints can be used:\n  {}\nRestore a copy, or start over with "
       "--checkpoint.resume=none",
       run.string(), reasons.size(), fmt::join(reasons, "\n  "));
}

bool is_checkpoint_folder(const fs::path& path) {
  std::error_code unreadable;
  return fs::exists(path / kManifestName, unreadable) ||
         parse_step(fs::path(path / "").parent_path().filename().string());
}

CheckpointReader open_checkpoint(const fs::path& path) {
  if (is_checkpoint_folder(path)) return CheckpointReader(path);
  auto newest = open_newest(path);
  if (!newest) {
    fail(ExitCode::kNoCheckpoint,
         "{}: no checkpoint here; expected a run folder or one of its checkpoints/step-*",
         path.string());
  }
  return std::move(*newest);
}

std::optional<CheckpointReader> resume_checkpoint(const fs::path& run, std::string_view resume) {
  if (resume == "none") return std::nullopt;
  if (resume == "auto") return open_newest(run);
  return open_checkpoint(fs::path(resume));
}

}  // namespace sbtrain
