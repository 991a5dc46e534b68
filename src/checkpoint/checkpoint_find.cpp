#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/hugging_face_name.h"
#include "core/log.h"

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

// One look at the run's folder.
struct Look {
  std::vector<CheckpointInfo> list;
  bool removed = false;  // the run has removed a checkpoint between its name and its manifest
};

Look look_at(const fs::path& parent) {
  const std::vector<std::string> names = names_in(parent);
  const std::set<std::string> present(names.begin(), names.end());
  Look look;
  std::vector<CheckpointInfo> refused;
  for (const std::string& name : names) {
    auto step = parse_step(name);
    if (!step) {  // set aside by an unfinished replacement: still the good one
      step = parse_step(name, kReplaced);
      if (!step || present.count(name.substr(0, name.size() - kReplaced.size())) != 0) continue;
    }
    CheckpointInfo info = describe(parent / name, *step);
    if (!info.problem.empty() && is_gone(info.folder)) {
      look.removed = true;
      continue;
    }
    (info.problem.empty() ? look.list : refused).push_back(std::move(info));
  }
  // In the order of saving: after a return to an earlier step, higher steps may be older saves.
  std::sort(look.list.begin(), look.list.end(), [](const auto& a, const auto& b) {
    return std::pair(a.manifest.sequence, a.step) > std::pair(b.manifest.sequence, b.step);
  });
  for (CheckpointInfo& info : refused) {  // their sequence is unknown: placed before lower steps
    const auto at = std::find_if(look.list.begin(), look.list.end(),
                                 [&](const auto& other) { return other.step < info.step; });
    look.list.insert(at, std::move(info));
  }
  return look;
}

}  // namespace

bool is_gone(const fs::path& folder) {
  std::error_code error;
  return fs::status(folder, error).type() == fs::file_type::not_found;
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  // A list without what was removed while it was made may lack what was saved meanwhile as well,
  // and have older checkpoints than an earlier list. The run removes one only when it has saved
  // another.
  constexpr int kLooks = 100;
  for (int i = 1;; ++i) {
    Look look = look_at(checkpoints_of(run));
    if (!look.removed || i == kLooks) return std::move(look.list);
  }
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

// Opens and uses a checkpoint on all ranks. Returns why it is refused, the same on all of them;
// empty: it is not.
std::string open_together(const CheckpointInfo& info, const UseCheckpoint& use,
                          const RankGroup& group, std::optional<CheckpointReader>& reader) {
  std::string problem;
  try {
    if (!info.problem.empty()) throw Error(ExitCode::kNoCheckpoint, info.problem);
    reader.emplace(info.folder, use ? Verification::kOnRead : Verification::kFull);
    if (use) use(*reader);
  } catch (const Error& error) {
    if (error.code() != ExitCode::kNoCheckpoint) throw;
    problem = error.what();
  }
  if (group.world == 1) return problem;
  const std::vector<std::string> problems = group.exchange(std::move(problem));
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (!problems[rank].empty()) return fmt::format("rank {}: {}", rank, problems[rank]);
  }
  return "";
}

// The checkpoints to try in turn, the same on all ranks.
struct Candidates {
  std::vector<CheckpointInfo> list;
  std::string saves;  // a line for each, its sequence number and name; changes when a run saves
};

// Those that rank 0 sees.
Candidates candidates(const fs::path& run, const RankGroup& group) {
  Candidates result{list_checkpoints(run), ""};
  for (const CheckpointInfo& info : result.list) {
    result.saves += fmt::format("{} {}\n", info.manifest.sequence, info.folder.filename().string());
  }
  if (group.world == 1) return result;
  const std::vector<CheckpointInfo> list = std::exchange(result.list, {});
  result.saves = group.exchange(std::move(result.saves)).front();
  std::istringstream lines(result.saves);
  int64_t sequence = 0;
  for (std::string name; lines >> sequence >> name;) {
    const fs::path folder = checkpoints_of(run) / name;
    const auto seen = std::find_if(list.begin(), list.end(),
                                   [&](const auto& info) { return info.folder == folder; });
    if (seen != list.end()) {
      result.list.push_back(*seen);
    } else {
      result.list.push_back({folder, 0, {}, folder.string() + ": not every rank sees it"});
    }
  }
  return result;
}

// The first of `list` that is good; the reasons against those before it.
std::optional<CheckpointReader> first_good(const std::vector<CheckpointInfo>& list,
                                           const UseCheckpoint& use, const RankGroup& group,
                                           std::vector<std::string>& reasons) {
  for (const CheckpointInfo& info : list) {
    std::optional<CheckpointReader> reader;
    const std::string reason = open_together(info, use, group, reader);
    if (reason.empty()) return reader;
    log_warning("{} checkpoint {}: {}", is_gone(info.folder) ? "its run has removed" : "refusing",
                info.folder.filename().string(), reason);
    reasons.push_back(reason);
  }
  return std::nullopt;
}

}  // namespace

std::optional<CheckpointReader> open_newest(const fs::path& run, std::vector<std::string>* refused,
                                            const UseCheckpoint& use, const RankGroup& group) {
  if (const std::string problem = verify_latest(run); !problem.empty()) {
    log_warning("{}; it is not needed to resume", problem);
    if (refused) refused->push_back(problem);
  }
  std::optional<CheckpointReader> found;
  std::vector<std::string> reasons;
  // A run that saves removes its oldest checkpoint, perhaps the one that was being read; then there
  // is a newer one.
  for (Candidates now = candidates(run, group);;) {
    reasons.clear();
    found = first_good(now.list, use, group, reasons);
    if (found) break;
    Candidates later = candidates(run, group);
    if (later.saves == now.saves) break;
    now = std::move(later);
  }
  if (refused) refused->insert(refused->end(), reasons.begin(), reasons.end());
  if (found) return found;
  if (reasons.empty()) return std::nullopt;
  fail(ExitCode::kNoCheckpoint,
       "{}: none of its {} checkpoints can be used:\n  {}\nRestore a copy, or start over with "
       "--checkpoint.resume=none",
       run.string(), reasons.size(), fmt::join(reasons, "\n  "));
}

std::optional<CheckpointReader> open_newest_after(const fs::path& run, int64_t sequence) {
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    if (!info.problem.empty() || info.manifest.sequence <= sequence) continue;
    try {
      return CheckpointReader(info.folder);
    } catch (const Error& error) {
      log_warning("refusing checkpoint {}: {}", info.folder.filename().string(), error.what());
    }
  }
  return std::nullopt;
}

int64_t last_sequence(const fs::path& run) {
  int64_t last = 0;
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    if (info.problem.empty()) last = std::max(last, info.manifest.sequence);
  }
  return last;
}

namespace {

fs::path last_good(const fs::path& run) {
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    if (!info.problem.empty()) {
      log_warning("refusing checkpoint {}: {}", info.folder.filename().string(), info.problem);
      continue;
    }
    if (info.manifest.last_good < 0) break;
    return checkpoints_of(run) / step_name(info.manifest.last_good);
  }
  fail(ExitCode::kNoCheckpoint,
       "{}: no checkpoint is known to be good, since none was saved after a step from another one "
       "had been applied; name the step to go back to: --checkpoint.resume=STEP",
       run.string());
}

}  // namespace

bool is_checkpoint_folder(const fs::path& path) {
  std::error_code unreadable;
  return fs::exists(path / kManifestName, unreadable) ||
         parse_step(fs::path(path / "").parent_path().filename().string());
}

CheckpointReader open_checkpoint(const fs::path& path, const UseCheckpoint& use,
                                 const RankGroup& group) {
  if (is_checkpoint_folder(path)) {
    std::optional<CheckpointReader> reader;
    const std::string problem = open_together({path, 0, {}, ""}, use, group, reader);
    if (!problem.empty()) throw Error(ExitCode::kNoCheckpoint, problem);
    return std::move(*reader);
  }
  auto newest = open_newest(path, nullptr, use, group);
  if (!newest) {
    std::error_code unreadable;
    fail(ExitCode::kNoCheckpoint,
         "{}: no checkpoint here; expected a run folder or one of its checkpoints/step-*{}",
         path.string(),
         fs::exists(path / "config.json", unreadable)
             ? "; `sbtrain import` turns a Hugging Face folder into a run"
             : hugging_face_hint(path));
  }
  return std::move(*newest);
}

std::optional<CheckpointReader> resume_checkpoint(const fs::path& run, std::string_view resume,
                                                  const UseCheckpoint& use,
                                                  const RankGroup& group) {
  if (resume == "none") return std::nullopt;
  if (resume == "auto") return open_newest(run, nullptr, use, group);
  if (resume == "last-good") return open_checkpoint(last_good(run), use, group);
  int64_t step = 0;
  const auto [end, error] = std::from_chars(resume.data(), resume.data() + resume.size(), step);
  if (error == std::errc() && end == resume.data() + resume.size() && step >= 0) {
    const fs::path folder = checkpoints_of(run) / step_name(step);
    if (is_gone(folder)) {
      fail(ExitCode::kNoCheckpoint,
           "{}: there is no such checkpoint; `sbtrain ckpt ls {}` lists those that there are",
           folder.string(), run.string());
    }
    return open_checkpoint(folder, use, group);
  }
  return open_checkpoint(fs::path(resume), use, group);
}

}  // namespace sbtrain
