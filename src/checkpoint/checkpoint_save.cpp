#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/stored_runs.h"
#include "checkpoint/workers.h"
#include "core/error.h"
#include "core/log.h"
#include "job/control.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

fs::path with_suffix(fs::path path, std::string_view suffix) {
  return path += suffix;
}

std::vector<std::string> exchange(const RankGroup& group, std::string mine) {
  if (group.world == 1) return {std::move(mine)};
  return group.exchange(std::move(mine));
}

// Runs this rank's share of a phase and tells all ranks how it went. Returns the ranks' results,
// or throws the first error on every rank, so that no rank continues without the others.
std::vector<std::string> together(const RankGroup& group,
                                  const std::function<std::string()>& share) {
  std::string mine;
  try {
    mine = "+" + share();
  } catch (const std::exception& e) {
    mine = std::string("-") + e.what();
  }
  std::vector<std::string> results = exchange(group, std::move(mine));
  for (size_t rank = 0; rank < results.size(); ++rank) {
    std::string& result = results[rank];
    if (result.starts_with('+')) {
      result.erase(0, 1);
    } else if (group.world == 1) {
      throw Error(ExitCode::kStorage, result.substr(1));
    } else {
      fail(ExitCode::kStorage, "rank {}: {}", rank,
           result.empty() ? "no answer" : result.substr(1));
    }
  }
  return results;
}

// Writes one chunk of a tensor, without padding, and returns its digest.
std::string write_chunk(SafetensorsWriter& writer, const std::string& key, const Snapshot& snapshot,
                        const TensorShard& tensor, int64_t chunk) {
  constexpr int64_t kElements = kChunkBytes / sizeof(float);
  const int64_t from = tensor.begin + chunk * kElements;
  const int64_t to = std::min(tensor.end, from + kElements);
  const auto bytes = static_cast<size_t>(to - from) * sizeof(float);
  thread_local std::vector<float> packed;
  const float* data = nullptr;
  if (snapshot.read) {
    packed.resize(kElements);
    snapshot.read(tensor, from, to, packed.data());
    data = packed.data();
  } else {
    for_each_stored_run(tensor, from, to, [&](int64_t logical, int64_t stored, int64_t count) {
      const float* run = tensor.stored.f32() + stored;
      if (count == to - from) {
        data = run;  // no padding in between: written from where it is
        return;
      }
      packed.resize(kElements);
      std::copy_n(run, count, packed.data() + logical);
      data = packed.data();
    });
  }
  writer.write(key, static_cast<uint64_t>(chunk) * kChunkBytes, data, bytes);
  return to_hex(sha256(data, bytes));
}

// This rank's file; one without a name if the rank has nothing to write.
ManifestFile write_shard(const Storage& storage, const fs::path& folder, const Snapshot& snapshot,
                         const RankGroup& group) {
  ManifestFile file;
  if (snapshot.wait) snapshot.wait();
  if (snapshot.tensors.empty()) return file;
  file.name = fmt::format("rank-{:05d}-of-{:05d}.safetensors", group.rank, group.world);
  std::vector<SafetensorsEntry> entries;
  SafetensorsMetadata metadata{{"format", "pt"}, {"step", std::to_string(snapshot.step)}};
  std::vector<std::pair<size_t, int64_t>> chunks;  // tensor, chunk
  for (const TensorShard& tensor : snapshot.tensors) {
    const std::string key = key_of(tensor.kind, tensor.name);
    require(tensor.begin >= 0 && tensor.begin <= tensor.end &&
                tensor.end <= checked_numel(tensor.shape),
            "{}: no range [{}, {}) of shape [{}]", key, tensor.begin, tensor.end,
            fmt::join(tensor.shape, ", "));
    entries.push_back({key, FileDType::kF32, stored_shape(tensor.shape, tensor.begin, tensor.end)});
    metadata[key] = fmt::format(R"({{"shape": [{}], "range": [{}, {}]}})",
                                fmt::join(tensor.shape, ", "), tensor.begin, tensor.end);
    const auto bytes = static_cast<uint64_t>(tensor.end - tensor.begin) * sizeof(float);
    const int64_t count = chunk_count(bytes);
    for (int64_t chunk = 0; chunk < count; ++chunk) chunks.emplace_back(file.tensors.size(), chunk);
    file.tensors.push_back({key, tensor.shape, tensor.begin, tensor.end,
                            std::vector<std::string>(static_cast<size_t>(count))});
  }
  SafetensorsWriter writer(storage, folder / file.name, std::move(entries), metadata);
  run_parallel(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const auto [tensor, chunk] = chunks[static_cast<size_t>(i)];
    ManifestTensor& listed = file.tensors[tensor];
    listed.sha256[static_cast<size_t>(chunk)] =
        write_chunk(writer, listed.key, snapshot, snapshot.tensors[tensor], chunk);
  });
  SafetensorsWriter::Result result = writer.finish();
  storage.sync_folder(folder);
  file.bytes = result.bytes;
  file.sha256 = std::move(result.header_sha256);
  return file;
}

ManifestFile write_text(const Storage& storage, const fs::path& folder, const char* name,
                        const std::string& text) {
  OutputFile file = storage.create(folder / name);
  file.write_at(0, text.data(), text.size());
  file.finish();
  return {name, text.size(), sha256_hex(text), {}};
}

// At the end of the numbers the step alone tells which checkpoint is newer.
int64_t next_sequence(const fs::path& run) {
  return std::min(last_sequence(run) + 1, kMaxSequence);
}

// Moves the complete `fresh` to `folder`. A checkpoint there stays whole until it is replaced.
void put_in_place(const Storage& storage, const fs::path& fresh, const fs::path& folder) {
  const fs::path parent = folder.parent_path();
  std::error_code unreadable;  // ignored: the rename will say why
  if (!fs::exists(folder, unreadable)) {
    storage.rename(fresh, folder);
    storage.sync_folder(parent);
    return;
  }
  if (storage.exchange(fresh, folder)) {
    storage.sync_folder(parent);
    storage.remove_tree(fresh);
    return;
  }
  // Between the two renames the old checkpoint is found under its other name.
  const fs::path old = with_suffix(folder, kReplaced);
  storage.remove_tree(old);
  storage.rename(folder, old);
  storage.rename(fresh, folder);
  storage.sync_folder(parent);
  storage.remove_tree(old);
}

// The folder is renamed first, so that it is never taken for a checkpoint when half removed.
void discard(const Storage& storage, const fs::path& folder) {
  const fs::path doomed = with_suffix(folder, kUnfinished);
  storage.remove_tree(doomed);
  storage.rename(folder, doomed);
  storage.remove_tree(doomed);
}

// Keeps the `keep` newest whole checkpoints; damaged ones do not count and are removed once they
// are older than those. However old they are, the one that has just been committed is kept, and the
// one that it knows to be good, since a run that diverges fills the places of the newest with bad
// ones.
void prune(const Storage& storage, const fs::path& run, int64_t keep, const Manifest& committed) {
  int64_t whole = 0;
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    const bool kept = whole < std::max<int64_t>(keep, 1) || info.step == committed.step ||
                      info.step == committed.last_good;
    if (info.problem.empty()) ++whole;
    if (!kept) discard(storage, info.folder);
  }
}

// A run folder that has been moved or removed is not made again: another job may use the path.
void require_folder(const fs::path& run) {
  std::error_code unreadable;
  if (fs::is_directory(run, unreadable)) return;
  fail(ExitCode::kStorage, "the run folder {} is gone: it was moved or removed during the run",
       run.string());
}

void commit(const Storage& storage, const fs::path& run, const fs::path& fresh,
            const Manifest& manifest) {
  const fs::path folder = checkpoints_of(run) / step_name(manifest.step);
  write_text(storage, fresh, kManifestName, format_manifest(manifest));
  storage.sync_folder(fresh);
  put_in_place(storage, fresh, folder);
  storage.replace_file(checkpoints_of(run) / kLatest, step_name(manifest.step) + "\n");
}

void remove_quietly(const Storage& storage, const fs::path& path) {
  try {
    storage.remove_tree(path);
  } catch (const std::exception& e) {
    log_warning("{}", e.what());
  }
}

}  // namespace

RankGroup make_rank_group(Control& control) {
  RankGroup group{control.rank(), control.world(), {}};
  group.exchange = [&control, members = all_ranks(group.world)](std::string mine) {
    return control.exchange("checkpoint", members, std::move(mine));
  };
  return group;
}

SavedCheckpoint save_checkpoint(const Storage& storage, const fs::path& run,
                                const Snapshot& snapshot, const RankGroup& group, int64_t keep) {
  const fs::path parent = checkpoints_of(run);
  const fs::path folder = parent / step_name(snapshot.step);
  const fs::path fresh = with_suffix(folder, kUnfinished);
  const bool leader = group.rank == 0;
  Manifest manifest;
  try {
    together(group, [&] {
      if (!leader) return "";
      require_folder(run);
      storage.remove_tree(fresh);
      storage.make_folder(parent);
      storage.make_folder(fresh);
      storage.sync_folder(run);
      return "";
    });
    const std::vector<std::string> files = together(group, [&] {
      const ManifestFile file = write_shard(storage, fresh, snapshot, group);
      return file.name.empty() ? "" : format_manifest_file(file);
    });
    together(group, [&] {
      if (!leader) return "";
      manifest = {.step = snapshot.step,
                  .tokens = snapshot.tokens,
                  .world = group.world,
                  .sequence = next_sequence(run),
                  .created = std::chrono::duration_cast<std::chrono::seconds>(
                                 std::chrono::system_clock::now().time_since_epoch())
                                 .count(),
                  .last_good = snapshot.last_good,
                  .fingerprints = snapshot.fingerprints,
                  .files = {}};
      for (const std::string& file : files) {
        if (!file.empty()) manifest.files.push_back(parse_manifest_file(file, "a rank's summary"));
      }
      manifest.files.push_back(write_text(storage, fresh, kStateName, snapshot.state_json));
      manifest.files.push_back(write_text(storage, fresh, kConfigName, snapshot.config_yaml));
      if (snapshot.before_commit) snapshot.before_commit();
      commit(storage, run, fresh, manifest);
      return "";
    });
  } catch (const Error&) {
    if (leader) remove_quietly(storage, fresh);
    throw;
  }
  if (leader) {
    try {
      prune(storage, run, keep, manifest);
    } catch (const std::exception& error) {  // the save itself is complete
      log_warning("old checkpoints remain: {}", error.what());
    }
  }
  return {folder, manifest.bytes()};
}

namespace {

// A save that was interrupted after its rename has left `latest` at the checkpoint before it.
void repair_latest(const Storage& storage, const fs::path& run) {
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    if (!info.problem.empty()) continue;
    const std::string text = step_name(info.step) + "\n";
    bool good = false;
    try {
      good = latest_text(run) == text;
    } catch (const Error&) {  // none, or unreadable
    }
    if (!good) storage.replace_file(checkpoints_of(run) / kLatest, text);
    return;
  }
}

}  // namespace

void clean_up_checkpoints(const Storage& storage, const fs::path& run) {
  const fs::path parent = checkpoints_of(run);
  const std::vector<std::string> names = names_in(parent);
  const std::set<std::string> present(names.begin(), names.end());
  for (const std::string& name : names) {
    if (parse_step(name, kReplaced)) {
      const std::string original = name.substr(0, name.size() - kReplaced.size());
      if (present.count(original) == 0) {
        log_info("{}: putting {} back, its replacement was not finished", parent.string(),
                 original);
        storage.rename(parent / name, parent / original);
      } else {
        storage.remove_tree(parent / name);
      }
    } else if (parse_step(name, kUnfinished) || name == std::string(kLatest) + ".tmp") {
      log_info("removing {}, left by a save that was cut off", (parent / name).string());
      storage.remove_tree(parent / name);
    }
  }
  repair_latest(storage, run);
}

}  // namespace sbtrain
