#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "core/error.h"
#include "parallel/communicator.h"

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

ManifestFile write_shard(const Storage& storage, const fs::path& folder, const Snapshot& snapshot,
                         const RankGroup& group) {
  ManifestFile file;
  file.name = fmt::format("rank-{:05d}-of-{:05d}.safetensors", group.rank, group.world);
  std::vector<SafetensorsEntry> entries;
  SafetensorsMetadata metadata{{"format", "pt"}, {"step", std::to_string(snapshot.step)}};
  for (const SnapshotTensor& tensor : snapshot.tensors) {
    const std::string key = key_of(tensor.kind, tensor.name);
    require(tensor.begin >= 0 && tensor.begin <= tensor.end &&
                tensor.end <= checked_numel(tensor.shape) &&
                static_cast<int64_t>(tensor.values.size()) == tensor.end - tensor.begin,
            "{}: {} values for range [{}, {}) of shape [{}]", key, tensor.values.size(),
            tensor.begin, tensor.end, fmt::join(tensor.shape, ", "));
    entries.push_back({key, FileDType::kF32, stored_shape(tensor.shape, tensor.begin, tensor.end)});
    metadata[key] = fmt::format(R"({{"shape": [{}], "range": [{}, {}]}})",
                                fmt::join(tensor.shape, ", "), tensor.begin, tensor.end);
    file.tensors.push_back({key, tensor.shape, tensor.begin, tensor.end, ""});
  }
  SafetensorsWriter writer(storage, folder / file.name, std::move(entries), metadata);
  for (size_t i = 0; i < snapshot.tensors.size(); ++i) {
    const std::vector<float>& values = snapshot.tensors[i].values;
    writer.write(file.tensors[i].key, values.data(), values.size() * sizeof(float));
  }
  SafetensorsWriter::Result result = writer.finish();
  storage.sync_folder(folder);
  file.bytes = result.bytes;
  file.sha256 = std::move(result.sha256);
  // All tensors are fp32, so that the writer keeps their order.
  for (size_t i = 0; i < file.tensors.size(); ++i) file.tensors[i].sha256 = result.tensor_sha256[i];
  return file;
}

ManifestFile write_text(const Storage& storage, const fs::path& folder, const char* name,
                        const std::string& text) {
  OutputFile file = storage.create(folder / name);
  file.write(text.data(), text.size());
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
    spdlog::warn("{}", e.what());
  }
}

}  // namespace

void copy_tensors(std::span<const TensorShard> shards, Snapshot& snapshot) {
  struct Run {
    const float* from;
    float* to;
    int64_t count;
  };
  constexpr int64_t kRun = int64_t{1} << 18;
  std::vector<Run> runs;
  snapshot.tensors.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const TensorShard& shard = shards[i];
    SnapshotTensor& copy = snapshot.tensors[i];
    static_cast<TensorRange&>(copy) = shard;
    copy.values.resize(static_cast<size_t>(shard.end - shard.begin));
    const int64_t cols = shard.shape.empty() ? 1 : shard.shape.back();
    const bool padded = shard.row_stride != 0 && shard.row_stride != cols;
    for (int64_t at = shard.begin; at < shard.end;) {
      const int64_t row_end = padded ? (at / cols + 1) * cols : shard.end;
      const int64_t count = std::min({row_end - at, shard.end - at, kRun});
      const int64_t gap = padded ? (at / cols - shard.begin / cols) * (shard.row_stride - cols) : 0;
      const int64_t offset = at - shard.begin;
      runs.push_back({shard.stored.f32() + offset + gap, copy.values.data() + offset, count});
      at += count;
    }
  }
  const auto count = static_cast<int64_t>(runs.size());
#pragma omp parallel for schedule(dynamic, 4)
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(runs[i].to, runs[i].from, static_cast<size_t>(runs[i].count) * sizeof(float));
  }
}

RankGroup make_rank_group(Communicator& communicator) {
  RankGroup group{communicator.rank(), communicator.world(), {}};
  group.exchange = [&communicator](std::string mine) {
    return communicator.all_gather(std::move(mine));
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
      storage.make_folders(fresh);
      storage.sync_folder(run);
      return "";
    });
    const std::vector<std::string> files = together(
        group, [&] { return format_manifest_file(write_shard(storage, fresh, snapshot, group)); });
    together(group, [&] {
      if (!leader) return "";
      manifest = {snapshot.step,
                  snapshot.tokens,
                  group.world,
                  next_sequence(run),
                  std::chrono::duration_cast<std::chrono::seconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count(),
                  snapshot.last_good,
                  snapshot.fingerprints,
                  {}};
      for (const std::string& file : files) {
        manifest.files.push_back(parse_manifest_file(file, "a rank's summary"));
      }
      manifest.files.push_back(write_text(storage, fresh, kStateName, snapshot.state_json));
      manifest.files.push_back(write_text(storage, fresh, kConfigName, snapshot.config_yaml));
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
      spdlog::warn("old checkpoints remain: {}", error.what());
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
        spdlog::info("{}: putting {} back, its replacement was not finished", parent.string(),
                     original);
        storage.rename(parent / name, parent / original);
      } else {
        storage.remove_tree(parent / name);
      }
    } else if (parse_step(name, kUnfinished) || name == std::string(kLatest) + ".tmp") {
      spdlog::info("removing {}, left by a save that was cut off", (parent / name).string());
      storage.remove_tree(parent / name);
    }
  }
  repair_latest(storage, run);
}

}  // namespace sbtrain
