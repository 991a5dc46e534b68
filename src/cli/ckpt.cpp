// sbtrain ckpt ls | verify: lists the checkpoints of a run and checks them for damage.
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/cli.h"
#include "config/schema.h"
#include "train/verify.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

struct CkptOptions {
  std::string path;
};

std::string human_bytes(uint64_t bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(units); ++unit) value /= 1000;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string age_of(int64_t created) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t s = std::chrono::duration_cast<std::chrono::seconds>(now).count() - created;
  if (s < 120) return fmt::format("{} s", std::max<int64_t>(s, 0));
  if (s < 2 * 3600) return fmt::format("{} min", s / 60);
  if (s < 2 * 86400) return fmt::format("{} h", s / 3600);
  return fmt::format("{} days", s / 86400);
}

// The run's checkpoints; a folder without any is an error that says where to look.
std::vector<CheckpointInfo> checkpoints_in(const std::string& run) {
  std::vector<CheckpointInfo> list = list_checkpoints(run);
  if (list.empty()) {
    fail(ExitCode::kNoCheckpoint,
         "{}: no checkpoint here; expected a run folder, such as runs/NAME", run);
  }
  return list;
}

// What the run updated its weights by. Older checkpoints do not say it: there was AdamW alone.
std::string optimizer_of(const Manifest& manifest) {
  const auto found = manifest.fingerprints.find("train.optimizer");
  return found != manifest.fingerprints.end() ? found->second : TrainConfig{}.optimizer.type;
}

// What is kept beside the weights: the optimizer's state and the average of the weights.
std::string state_of(const Manifest& manifest) {
  std::set<std::string> kinds;
  for (const ManifestFile& file : manifest.files) {
    for (const ManifestTensor& tensor : file.tensors) {
      kinds.insert(tensor.key.substr(0, tensor.key.find('/')));
    }
  }
  kinds.erase(kModelKind);
  return fmt::format("{}", fmt::join(kinds, ", "));
}

ExitCode run_ls(const CkptOptions& options) {
  const std::vector<CheckpointInfo> list = checkpoints_in(options.path);
  fmt::print("{:>10} {:>16} {:>10} {:>6} {:>8}  {:<9} {:<8}  {}\n", "step", "tokens", "size",
             "world", "age", "optimizer", "manifest", "state");
  for (const CheckpointInfo& info : list) {
    if (!info.problem.empty()) {
      fmt::print("{:>10} {:>16} {:>10} {:>6} {:>8}  {:<9} bad: {}\n", info.step, "-", "-", "-", "-",
                 "-", info.problem);
      continue;
    }
    const Manifest& manifest = info.manifest;
    fmt::print("{:>10} {:>16} {:>10} {:>6} {:>8}  {:<9} {:<8}  {}\n", info.step, manifest.tokens,
               human_bytes(manifest.bytes()), manifest.world, age_of(manifest.created),
               optimizer_of(manifest), "ok", state_of(manifest));
  }
  return ExitCode::kDone;
}

struct Findings {
  std::vector<std::string> problems;  // none: the checkpoint is good
  Manifest manifest;                  // of a good one, as it was when it was checked
};

Findings examine(const fs::path& folder) {
  Findings found{verify_checkpoint(folder), {}};
  if (!found.problems.empty()) return found;
  try {
    const CheckpointReader checkpoint(folder, Verification::kOnRead);
    const std::string file = (folder / "config.yaml").string();
    found.manifest = checkpoint.manifest();
    found.problems = verify_contents(checkpoint, parse_config(checkpoint.config_yaml(), file));
  } catch (const Error& error) {
    found.problems = {error.what()};
  }
  return found;
}

// Which save a folder holds: the sequence number of its manifest; nothing if that cannot be read.
std::optional<int64_t> save_in(const fs::path& folder) {
  try {
    return read_manifest(folder).sequence;
  } catch (const Error&) {
    return std::nullopt;
  }
}

enum class Verdict : uint8_t { kGood, kBad, kGone };

// Checks one checkpoint and prints the result. A run that saves while this happens removes its
// oldest checkpoint, or puts another in its place: what was found then is no damage.
Verdict report(const fs::path& folder) {
  const std::optional<int64_t> before = save_in(folder);
  const Findings found = examine(folder);
  if (found.problems.empty()) {
    fmt::print("{}: ok ({} files, {})\n", folder.string(), found.manifest.files.size() + 1,
               human_bytes(found.manifest.bytes()));
    return Verdict::kGood;
  }
  if (!fs::exists(folder) || (before && save_in(folder) != before)) {
    fmt::print("{}: not here any more; the run has saved in the meantime\n", folder.string());
    return Verdict::kGone;
  }
  for (const std::string& problem : found.problems) {
    fmt::print("{}: bad: {}\n", folder.string(), problem);
  }
  return Verdict::kBad;
}

// Checks all checkpoints of a run; returns true if all are good.
bool report_run(const std::string& run) {
  bool good = true;
  for (const CheckpointInfo& info : checkpoints_in(run)) {
    good = report(info.folder) != Verdict::kBad && good;
  }
  const std::string problem = verify_latest(run);
  if (!problem.empty()) fmt::print("bad: {}\n", problem);
  return good && problem.empty();
}

ExitCode run_verify(const CkptOptions& options) {
  const bool good = is_checkpoint_folder(options.path) ? report(options.path) == Verdict::kGood
                                                       : report_run(options.path);
  return good ? ExitCode::kDone : ExitCode::kNoCheckpoint;
}

}  // namespace

void add_ckpt(Command app, Action& action) {
  Command ckpt = app.add_subcommand("ckpt", "List and verify checkpoints");
  ckpt.require_subcommand(1);
  auto options = std::make_shared<CkptOptions>();

  Command ls = ckpt.add_subcommand("ls", "The checkpoints of a run, newest first");
  ls.add_option("run", options->path, "Run folder, such as runs/tiny_sb").required();
  ls.callback([options, &action] { action = [options] { return run_ls(*options); }; });

  Command verify = ckpt.add_subcommand(
      "verify", "Check every byte against its checksums; exit code 5 if anything is bad");
  verify.add_option("path", options->path, "Run folder, or one of its checkpoints/step-* folders")
      .required();
  verify.callback([options, &action] { action = [options] { return run_verify(*options); }; });
}

}  // namespace sbtrain
