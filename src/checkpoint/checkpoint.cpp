#include "checkpoint/checkpoint.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "parallel/communicator.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kUnfinished = ".tmp";  // being written, or being removed
constexpr std::string_view kReplaced = ".old";    // set aside by a save at the same step
constexpr const char* kManifestName = "manifest.json";
constexpr const char* kStateName = "state.json";
constexpr const char* kConfigName = "config.yaml";
constexpr const char* kLatest = "latest";

fs::path checkpoints_of(const fs::path& run) {
  return run / "checkpoints";
}
std::string step_name(int64_t step) {
  return fmt::format("{}{:08d}", kStepPrefix, step);
}
fs::path with_suffix(fs::path path, std::string_view suffix) {
  return path += suffix;
}

// The step of "step-00000100" + suffix; nothing for any other name.
std::optional<int64_t> parse_step(std::string_view name, std::string_view suffix = "") {
  if (!name.starts_with(kStepPrefix) || !name.ends_with(suffix)) return std::nullopt;
  name.remove_prefix(kStepPrefix.size());
  name.remove_suffix(suffix.size());
  const bool digits =
      !name.empty() && name.size() <= 18 &&
      std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) return std::nullopt;
  return std::stoll(std::string(name));
}

// Names in a folder, sorted; none if it does not exist.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail(ExitCode::kNoCheckpoint, "{}: cannot list: {}", folder.string(), error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string key_of(TensorKind kind, std::string_view name) {
  return fmt::format("{}/{}", tensor_kind_name(kind), name);
}

// A tensor that one rank holds whole keeps its shape in the file, so that other programs can use
// it; a part of one is a flat range.
std::vector<int64_t> stored_shape(const std::vector<int64_t>& shape, int64_t begin, int64_t end) {
  if (begin == 0 && end == checked_numel(shape)) return shape;
  return {end - begin};
}

// ---- saving

std::vector<std::string> exchange(const RankGroup& group, std::string mine) {
  if (group.world == 1) return {std::move(mine)};
  return group.exchange(std::move(mine));
}

// Runs this rank's share of a phase and tells all ranks how it went. Returns the ranks' results,
// or throws the first error on every rank, so that no rank goes on alone.
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
  // All are fp32, so the file keeps our order.
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

int64_t next_sequence(const fs::path& run) {
  int64_t last = 0;
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    if (info.problem.empty()) last = std::max(last, info.manifest.sequence);
  }
  return last + 1;
}

// Moves the complete `fresh` to `folder`. What stood there is whole until it is replaced.
void put_in_place(const Storage& storage, const fs::path& fresh, const fs::path& folder) {
  const fs::path parent = folder.parent_path();
  std::error_code unreadable;  // then the rename tells why
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

// Renamed first, so that no half-removed folder can be taken for a checkpoint.
void discard(const Storage& storage, const fs::path& folder) {
  const fs::path doomed = with_suffix(folder, kUnfinished);
  storage.remove_tree(doomed);
  storage.rename(folder, doomed);
  storage.remove_tree(doomed);
}

// Keeps the `keep` newest; damaged ones do not count and go once they are older than those. The
// caller has just committed the newest.
void prune(const Storage& storage, const fs::path& run, int64_t keep) {
  int64_t good = 0;
  for (const CheckpointInfo& info : list_checkpoints(run)) {
    const bool kept = good < std::max<int64_t>(keep, 1);
    if (info.problem.empty()) ++good;
    if (!kept) discard(storage, info.folder);
  }
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

// ---- loading

// Reads a file after its size, and its content if asked for, have been found right.
void check_file(const fs::path& folder, const ManifestFile& file, Verification verification) {
  const InputFile input(folder / file.name);
  if (input.size() != file.bytes) {
    fail(ExitCode::kNoCheckpoint, "{}: {} bytes, but the manifest says {}", input.path().string(),
         input.size(), file.bytes);
  }
  if (verification == Verification::kFull && input.sha256(0, file.bytes) != file.sha256) {
    fail(ExitCode::kNoCheckpoint, "{}: damaged: its SHA-256 is not the manifest's",
         input.path().string());
  }
}

// The tensors of a damaged shard whose own checksum is wrong: what to tell the user.
std::vector<std::string> damaged_tensors(const fs::path& folder, const ManifestFile& file) {
  std::vector<std::string> damaged;
  const SafetensorsReader shard(folder / file.name);
  const InputFile input(shard.path());
  for (const ManifestTensor& tensor : file.tensors) {
    if (!shard.has(tensor.key)) {
      damaged.push_back(tensor.key + " (missing)");
      continue;
    }
    const SafetensorsEntry& entry = shard.at(tensor.key);
    if (input.sha256(shard.data_offset() + entry.begin, entry.bytes()) != tensor.sha256) {
      damaged.push_back(tensor.key);
    }
  }
  return damaged;
}

// check_file, with the damaged tensors named in the error.
void check_file_by_tensor(const fs::path& folder, const ManifestFile& file,
                          Verification verification) {
  try {
    check_file(folder, file, verification);
  } catch (const Error& error) {
    std::string tensors;
    try {
      if (!file.tensors.empty()) {
        const std::vector<std::string> damaged = damaged_tensors(folder, file);
        tensors = damaged.empty() ? "its header" : fmt::format("{}", fmt::join(damaged, ", "));
      }
    } catch (const Error& why) {
      tensors = why.what();
    }
    if (tensors.empty()) throw;
    fail(error.code(), "{} ({})", error.what(), tensors);
  }
}

std::string read_text(const fs::path& folder, const Manifest& manifest, const char* name) {
  for (const ManifestFile& file : manifest.files) {
    if (file.name != name) continue;
    std::string text(file.bytes, '\0');
    InputFile(folder / name).read(0, text.data(), text.size());
    return text;
  }
  fail(ExitCode::kNoCheckpoint, "{}: the manifest lists no {}", folder.string(), name);
}

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
    copy.kind = shard.kind;
    copy.name = shard.name;
    copy.shape = shard.shape;
    copy.begin = shard.begin;
    copy.end = shard.end;
    copy.values.resize(static_cast<size_t>(shard.end - shard.begin));
    const int64_t cols = shard.shape.empty() ? 1 : shard.shape.back();
    const bool padded = shard.row_stride != 0 && shard.row_stride != cols;
    for (int64_t at = shard.begin; at < shard.end;) {
      const int64_t row_end = padded ? (at / cols + 1) * cols : shard.end;
      const int64_t count = std::min({row_end - at, shard.end - at, kRun});
      const int64_t gap = padded ? (at / cols - shard.begin / cols) * (shard.row_stride - cols) : 0;
      const int64_t offset = at - shard.begin;
      runs.push_back({shard.data + offset + gap, copy.values.data() + offset, count});
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
  group.exchange = [&communicator](const std::string& mine) {
    std::vector<std::string> all;
    all.reserve(static_cast<size_t>(communicator.world()));
    for (int rank = 0; rank < communicator.world(); ++rank) {
      all.push_back(communicator.broadcast(rank == communicator.rank() ? mine : "", rank));
    }
    return all;
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
      prune(storage, run, keep);
    } catch (const std::exception& error) {  // the save itself is complete
      spdlog::warn("old checkpoints remain: {}", error.what());
    }
  }
  return {folder, manifest.bytes()};
}

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
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  const fs::path parent = checkpoints_of(run);
  const std::vector<std::string> names = names_in(parent);
  const std::set<std::string> present(names.begin(), names.end());
  std::vector<CheckpointInfo> list;
  std::vector<CheckpointInfo> refused;
  for (const std::string& name : names) {
    auto step = parse_step(name);
    if (!step) {  // set aside in the middle of a replacement: still the good one
      step = parse_step(name, kReplaced);
      if (!step || present.count(name.substr(0, name.size() - kReplaced.size())) != 0) continue;
    }
    CheckpointInfo info = describe(parent / name, *step);
    (info.problem.empty() ? list : refused).push_back(std::move(info));
  }
  // By order of saving: after going back to an older step, higher steps are the older saves.
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) {
    return std::pair(a.manifest.sequence, a.step) > std::pair(b.manifest.sequence, b.step);
  });
  for (CheckpointInfo& info : refused) {  // no sequence is known: before lower steps
    const auto at = std::find_if(list.begin(), list.end(),
                                 [&](const auto& other) { return other.step < info.step; });
    list.insert(at, std::move(info));
  }
  return list;
}

CheckpointReader::CheckpointReader(const fs::path& folder, Verification verification)
    : folder_(folder), manifest_(read_manifest(folder)) {
  for (const ManifestFile& file : manifest_.files) {
    check_file_by_tensor(folder_, file, verification);
  }
  for (const ManifestFile& file : manifest_.files) {
    if (!file.tensors.empty()) open_shard(file);
  }
  check_coverage();
  state_json_ = read_text(folder_, manifest_, kStateName);
  config_yaml_ = read_text(folder_, manifest_, kConfigName);
}

// Takes note of what a shard holds; its header and the manifest must tell the same.
void CheckpointReader::open_shard(const ManifestFile& file) {
  const SafetensorsReader& shard = shards_.emplace_back(folder_ / file.name);
  for (const ManifestTensor& tensor : file.tensors) {
    const SafetensorsEntry& entry = shard.at(tensor.key);
    if (entry.dtype != FileDType::kF32 ||
        entry.shape != stored_shape(tensor.shape, tensor.begin, tensor.end)) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {}: {}[{}] is not range [{}, {}) of fp32 [{}]",
           shard.path().string(), tensor.key, file_dtype_name(entry.dtype),
           fmt::join(entry.shape, ", "), tensor.begin, tensor.end, fmt::join(tensor.shape, ", "));
    }
    StoredTensor& stored = tensors_[tensor.key];
    if (!stored.pieces.empty() && stored.shape != tensor.shape) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {}: shape [{}] here, [{}] in another shard",
           shard.path().string(), tensor.key, fmt::join(tensor.shape, ", "),
           fmt::join(stored.shape, ", "));
    }
    stored.shape = tensor.shape;
    stored.pieces.push_back({tensor.begin, tensor.end, shards_.size() - 1});
  }
}

// Every element of every tensor is stored exactly once.
void CheckpointReader::check_coverage() {
  for (auto& [key, tensor] : tensors_) {
    std::sort(tensor.pieces.begin(), tensor.pieces.end(), [](const Piece& a, const Piece& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    int64_t at = 0;
    for (const Piece& piece : tensor.pieces) {
      if (piece.begin != at && piece.begin != piece.end) break;
      at = std::max(at, piece.end);
    }
    const int64_t numel = checked_numel(tensor.shape);
    if (at != numel) {
      fail(ExitCode::kNoCheckpoint,
           "{}: tensor {}: the shards do not hold each of its {} elements"
           " once (first doubt at {})",
           folder_.string(), key, numel, at);
    }
  }
}

const CheckpointReader::StoredTensor& CheckpointReader::stored(const std::string& key) const {
  const auto found = tensors_.find(key);
  if (found == tensors_.end()) {
    fail(ExitCode::kNoCheckpoint, "{}: no tensor {}; was it saved by a run of another model?",
         folder_.string(), key);
  }
  return found->second;
}

bool CheckpointReader::has(TensorKind kind, std::string_view name) const {
  return tensors_.find(key_of(kind, name)) != tensors_.end();
}

const std::vector<int64_t>& CheckpointReader::shape(TensorKind kind, std::string_view name) const {
  return stored(key_of(kind, name)).shape;
}

std::vector<std::string> CheckpointReader::names(TensorKind kind) const {
  const std::string prefix = key_of(kind, "");
  std::vector<std::string> names;
  for (const auto& [key, tensor] : tensors_) {
    if (key.starts_with(prefix)) names.push_back(key.substr(prefix.size()));
  }
  return names;
}

void CheckpointReader::read(TensorKind kind, std::string_view name, int64_t begin, int64_t end,
                            float* out, int64_t row_stride) const {
  const std::string key = key_of(kind, name);
  const std::vector<int64_t>& shape = stored(key).shape;
  const int64_t cols = shape.empty() ? 1 : shape.back();
  if (row_stride == 0 || row_stride == cols) {
    read_flat(key, begin, end, out);
    return;
  }
  std::vector<float> flat(static_cast<size_t>(std::max<int64_t>(end - begin, 0)));
  read_flat(key, begin, end, flat.data());
  for (int64_t at = begin; at < end;) {
    const int64_t count = std::min((at / cols + 1) * cols, end) - at;
    const int64_t gap = (at / cols - begin / cols) * (row_stride - cols);
    std::copy_n(flat.data() + (at - begin), count, out + (at - begin) + gap);
    at += count;
  }
}

void CheckpointReader::read_flat(const std::string& key, int64_t begin, int64_t end,
                                 float* out) const {
  const StoredTensor& tensor = stored(key);
  if (begin < 0 || begin > end || end > checked_numel(tensor.shape)) {
    fail(ExitCode::kNoCheckpoint, "{}: tensor {} has shape [{}]: no range [{}, {})",
         folder_.string(), key, fmt::join(tensor.shape, ", "), begin, end);
  }
  for (const Piece& piece : tensor.pieces) {
    const int64_t from = std::max(begin, piece.begin);
    const int64_t to = std::min(end, piece.end);
    if (from >= to) continue;
    const SafetensorsReader& shard = shards_[piece.shard];
    shard.read(shard.at(key), static_cast<uint64_t>(from - piece.begin) * sizeof(float),
               out + (from - begin), static_cast<uint64_t>(to - from) * sizeof(float));
  }
}

std::vector<std::string> verify_checkpoint(const fs::path& folder) {
  std::vector<std::string> problems;
  const auto attempt = [&](const auto& check) {
    try {
      check();
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  };
  Manifest manifest;
  attempt([&] { manifest = read_manifest(folder); });
  for (const ManifestFile& file : manifest.files) {
    attempt([&] { check_file_by_tensor(folder, file, Verification::kFull); });
  }
  if (problems.empty()) attempt([&] { CheckpointReader(folder, Verification::kHeaders); });
  return problems;
}

std::string verify_latest(const fs::path& run) {
  const std::vector<CheckpointInfo> list = list_checkpoints(run);
  if (list.empty()) return "";
  const fs::path path = checkpoints_of(run) / kLatest;
  std::error_code unreadable;
  if (!fs::exists(path, unreadable) && !unreadable) return "";  // the first save was cut off
  try {
    const InputFile file(path);
    std::string text(std::min<uint64_t>(file.size(), 64), '\0');
    file.read(0, text.data(), text.size());
    for (const CheckpointInfo& info : list) {
      if (text == step_name(info.step) + "\n") return "";
    }
    return fmt::format("{}: damaged: it does not name a checkpoint of this run", path.string());
  } catch (const Error& error) {
    return error.what();
  }
}

std::optional<CheckpointReader> open_newest(const fs::path& run,
                                            std::vector<std::string>* refused) {
  const std::vector<CheckpointInfo> list = list_checkpoints(run);
  if (const std::string problem = verify_latest(run); !problem.empty()) {
    spdlog::warn("{}; it is not needed to resume", problem);
    if (refused) refused->push_back(problem);
  }
  std::vector<std::string> reasons;
  for (const CheckpointInfo& info : list) {
    try {
      if (!info.problem.empty()) throw Error(ExitCode::kNoCheckpoint, info.problem);
      return CheckpointReader(info.folder);
    } catch (const Error& error) {
      spdlog::warn("refusing checkpoint {}: {}", info.folder.filename().string(), error.what());
      reasons.emplace_back(error.what());
      if (refused) refused->emplace_back(error.what());
    }
  }
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
