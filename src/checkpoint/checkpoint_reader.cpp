#include <fmt/ranges.h>

#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "core/error.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

// Checks a file's size and, for Verification::kFull, its SHA-256.
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

// The tensors of a damaged shard whose own checksum is wrong, for messages.
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

}  // namespace

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
    stored.pieces.push_back({tensor.begin, tensor.end, shards_.size() - 1});
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
    attempt([&] {
      check_file_by_tensor(folder, file, Verification::kFull);
      if (file.tensors.empty()) return;
      const std::vector<std::string> damaged = damaged_tensors(folder, file);
      if (damaged.empty()) return;
      fail(ExitCode::kNoCheckpoint, "{}: the manifest has another SHA-256 for {}",
           (folder / file.name).string(), fmt::join(damaged, ", "));
    });
  }
  if (problems.empty()) attempt([&] { CheckpointReader(folder, Verification::kHeaders); });
  return problems;
}

}  // namespace sbtrain
