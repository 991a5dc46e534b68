#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/stored_runs.h"
#include "checkpoint/workers.h"
#include "core/error.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kChunkElements = kChunkBytes / sizeof(float);

[[noreturn]] void fail_damaged(const fs::path& path, const std::string& what) {
  fail(ExitCode::kNoCheckpoint, "{}: damaged: its SHA-256 is not the manifest's{}", path.string(),
       what.empty() ? "" : fmt::format(" ({})", what));
}

uint64_t data_bytes(const ManifestTensor& tensor) {
  return static_cast<uint64_t>(tensor.end - tensor.begin) * sizeof(float);
}

// The tensors of a shard whose data is not that of the manifest, in the manifest's order.
std::vector<std::string> damaged_tensors(const SafetensorsReader& shard, const ManifestFile& file,
                                         int64_t version) {
  const InputFile input(shard.path());
  const uint64_t chunk_bytes = version == 1 ? UINT64_MAX : kChunkBytes;
  std::vector<std::pair<size_t, uint64_t>> chunks;  // tensor, first byte of its data
  std::vector<std::string> problems(file.tensors.size());
  for (size_t t = 0; t < file.tensors.size(); ++t) {
    const ManifestTensor& tensor = file.tensors[t];
    if (!shard.has(tensor.key) || shard.at(tensor.key).bytes() != data_bytes(tensor)) {
      problems[t] = tensor.key + (shard.has(tensor.key) ? "" : " (missing)");
      continue;
    }
    for (size_t c = 0; c < tensor.sha256.size(); ++c) chunks.emplace_back(t, c * chunk_bytes);
  }
  std::mutex mutex;
  run_parallel(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const auto [t, offset] = chunks[static_cast<size_t>(i)];
    const ManifestTensor& tensor = file.tensors[t];
    const uint64_t bytes = std::min(data_bytes(tensor) - offset, chunk_bytes);
    const uint64_t at = shard.data_offset() + shard.at(tensor.key).begin + offset;
    if (input.sha256(at, bytes) == tensor.sha256[offset / chunk_bytes]) return;
    const std::lock_guard lock(mutex);
    problems[t] = tensor.key;
  });
  std::erase(problems, "");
  return problems;
}

// Checks all of a file but the data of tensors: its size and its checksum. The checksum of a shard
// of version 1 covers the data too.
void check_file(const fs::path& folder, const ManifestFile& file, int64_t version) {
  const InputFile input(folder / file.name);
  if (input.size() != file.bytes) {
    fail(ExitCode::kNoCheckpoint, "{}: {} bytes, but the manifest says {}", input.path().string(),
         input.size(), file.bytes);
  }
  if (file.tensors.empty()) {
    if (input.sha256(0, file.bytes) != file.sha256) fail_damaged(input.path(), "");
    return;
  }
  const SafetensorsReader shard(input.path());
  const uint64_t covered = version == 1 ? file.bytes : shard.data_offset();
  if (input.sha256(0, covered) == file.sha256) return;
  const auto damaged =
      version == 1 ? damaged_tensors(shard, file, version) : std::vector<std::string>{};
  fail_damaged(input.path(),
               damaged.empty() ? "its header" : fmt::format("{}", fmt::join(damaged, ", ")));
}

// check_file, and the data by the checksums of its tensors. In version 1 these say no more than
// that of the file, unless the manifest contradicts itself.
void check_whole_file(const fs::path& folder, const ManifestFile& file, int64_t version) {
  check_file(folder, file, version);
  if (file.tensors.empty()) return;
  const SafetensorsReader shard(folder / file.name);
  const std::vector<std::string> damaged = damaged_tensors(shard, file, version);
  if (!damaged.empty()) fail_damaged(shard.path(), fmt::format("{}", fmt::join(damaged, ", ")));
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

}  // namespace

CheckpointReader::CheckpointReader(const fs::path& folder, Verification verification)
    : folder_(folder), manifest_(std::make_unique<const Manifest>(read_manifest(folder))) {
  const auto files = static_cast<int64_t>(manifest_->files.size());
  run_parallel(files, [&](int64_t i) {
    check_file(folder_, manifest_->files[static_cast<size_t>(i)], manifest_->version);
  });
  for (const ManifestFile& file : manifest_->files) {
    if (!file.tensors.empty()) open_shard(file);
  }
  check_coverage();
  state_json_ = read_text(folder_, *manifest_, kStateName);
  config_yaml_ = read_text(folder_, *manifest_, kConfigName);
  if (verification == Verification::kFull) verify_data();
}

// Records what a shard holds; its header must agree with the manifest.
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
    const auto chunks = static_cast<size_t>(chunk_count(data_bytes(tensor)));
    Piece piece{tensor.begin, tensor.end, shards_.size() - 1,
                &tensor,      &entry,     std::make_unique<std::atomic<bool>[]>(chunks)};
    // The checksum of a file of version 1, which has been checked, covers the data.
    for (size_t i = 0; i < chunks; ++i) piece.verified[i] = manifest_->version == 1;
    stored.pieces.push_back(std::move(piece));
  }
}

// Checks that every element of every tensor is stored exactly once.
void CheckpointReader::check_coverage() {
  for (auto& [key, tensor] : tensors_) {
    std::sort(tensor.pieces.begin(), tensor.pieces.end(), [](const Piece& a, const Piece& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    const int64_t numel = checked_numel(tensor.shape);
    int64_t at = 0;
    bool once = true;
    for (const Piece& piece : tensor.pieces) {
      once = piece.begin == at || piece.begin == piece.end;
      if (!once) break;
      at = std::max(at, piece.end);
    }
    if (!once || at != numel) {
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

std::string CheckpointReader::key(std::string_view kind, std::string_view name) const {
  return key_of(kind == kModelKind ? weights_ : kind, name);
}

void CheckpointReader::use_average() {
  if (names(kAverageKind).empty()) {
    fail(ExitCode::kConfig,
         "{}: it has no average of the weights: the run kept none when it was saved (train.ema). "
         "Leave --ema out, or name a checkpoint that has one; `sbtrain ckpt ls` says which do",
         folder_.string());
  }
  weights_ = kAverageKind;
}

bool CheckpointReader::has(std::string_view kind, std::string_view name) const {
  return tensors_.find(key(kind, name)) != tensors_.end();
}

const std::vector<int64_t>& CheckpointReader::shape(std::string_view kind,
                                                    std::string_view name) const {
  return stored(key(kind, name)).shape;
}

std::vector<std::string> CheckpointReader::names(std::string_view kind) const {
  const std::string prefix = key(kind, "");
  std::vector<std::string> names;
  for (const auto& [key, tensor] : tensors_) {
    if (key.starts_with(prefix)) names.push_back(key.substr(prefix.size()));
  }
  return names;
}

std::vector<std::string> CheckpointReader::kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [key, tensor] : tensors_) {
    const std::string kind = key.substr(0, key.find('/'));
    if (kinds.empty() || kinds.back() != kind) kinds.push_back(kind);
  }
  return kinds;
}

void CheckpointReader::read(std::string_view kind, std::string_view name, int64_t begin,
                            int64_t end, float* out) const {
  const Tensor to(out, DType::kF32, {std::max<int64_t>(end - begin, 0)});
  const TensorShard shard{
      {std::string(kind), std::string(name), shape(kind, name), begin, end}, to, 0};
  read(std::span(&shard, 1));
}

void CheckpointReader::read(std::span<const TensorShard> shards) const {
  std::vector<ChunkRead> reads;
  for (const TensorShard& shard : shards) add_reads(shard, reads);
  run_parallel(static_cast<int64_t>(reads.size()),
               [&](int64_t i) { read_chunk(reads[static_cast<size_t>(i)]); });
}

void CheckpointReader::verify_data() const {
  std::vector<ChunkRead> reads;
  for (const auto& [key, tensor] : tensors_) {
    for (const Piece& piece : tensor.pieces) {
      const int64_t chunks = chunk_count(data_bytes(*piece.manifest));
      for (int64_t c = 0; c < chunks; ++c) reads.push_back({&piece, c, nullptr, 0, 0});
    }
  }
  run_parallel(static_cast<int64_t>(reads.size()),
               [&](int64_t i) { read_chunk(reads[static_cast<size_t>(i)]); });
}

void CheckpointReader::add_reads(const TensorShard& shard, std::vector<ChunkRead>& reads) const {
  const std::string key = this->key(shard.kind, shard.name);
  const StoredTensor& tensor = stored(key);
  if (shard.begin < 0 || shard.begin > shard.end || shard.end > checked_numel(tensor.shape)) {
    fail(ExitCode::kNoCheckpoint, "{}: tensor {} has shape [{}]: no range [{}, {})",
         folder_.string(), key, fmt::join(tensor.shape, ", "), shard.begin, shard.end);
  }
  for (const Piece& piece : tensor.pieces) {
    const int64_t from = std::max(shard.begin, piece.begin);
    const int64_t end = std::min(shard.end, piece.end);
    for (int64_t at = from; at < end;) {
      const int64_t chunk = (at - piece.begin) / kChunkElements;
      const int64_t chunk_end = std::min(end, piece.begin + (chunk + 1) * kChunkElements);
      reads.push_back({&piece, chunk, &shard, at, chunk_end});
      at = chunk_end;
    }
  }
}

// Reads the part of a chunk that a shard needs, or all of it if it has not been verified yet.
void CheckpointReader::read_chunk(const ChunkRead& read) const {
  const Piece& piece = *read.piece;
  const SafetensorsReader& file = shards_[piece.shard];
  const int64_t first = piece.begin + read.chunk * kChunkElements;
  const int64_t last = std::min(piece.end, first + kChunkElements);
  std::atomic<bool>& verified = piece.verified[static_cast<size_t>(read.chunk)];
  if (verified && read.to == nullptr) return;

  float* direct = nullptr;  // where the part goes, if it has no padding in between
  if (read.to != nullptr) {
    for_each_stored_run(*read.to, read.from, read.end,
                        [&](int64_t /*logical*/, int64_t stored, int64_t count) {
                          if (count == read.end - read.from)
                            direct = read.to->stored.f32() + stored;
                        });
  }
  const bool whole = !verified && (read.from != first || read.end != last);
  const int64_t from = whole ? first : read.from;
  const int64_t end = whole ? last : read.end;
  const auto bytes = static_cast<uint64_t>(end - from) * sizeof(float);
  thread_local std::vector<float> buffer;
  float* to = direct;
  if (whole || direct == nullptr) {
    buffer.resize(kChunkElements);
    to = buffer.data();
  }
  file.read(*piece.entry, static_cast<uint64_t>(from - piece.begin) * sizeof(float), to, bytes);
  if (!verified) {
    const std::string& expected = piece.manifest->sha256[static_cast<size_t>(read.chunk)];
    if (to_hex(sha256(to, bytes)) != expected) fail_damaged(file.path(), piece.manifest->key);
    verified = true;
  }
  if (read.to == nullptr || to == direct) return;
  for_each_stored_run(
      *read.to, read.from, read.end, [&](int64_t logical, int64_t stored, int64_t count) {
        std::copy_n(to + (read.from - from) + logical, count, read.to->stored.f32() + stored);
      });
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
    attempt([&] { check_whole_file(folder, file, manifest.version); });
  }
  if (problems.empty()) attempt([&] { CheckpointReader(folder, Verification::kOnRead); });
  return problems;
}

}  // namespace sbtrain
