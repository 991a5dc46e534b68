// manifest.json: what a checkpoint consists of. Written last and covered by its own checksum, it
// is what makes a folder a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/tensor_range.h"

namespace sbtrain {

// "model", "adam_m", "adam_v": with a slash and the tensor's name, its name in shard files.
const char* tensor_kind_name(TensorKind kind);

// Bumped when the layout changes so that older programs must refuse it.
inline constexpr int64_t kCheckpointVersion = 1;

// One rank's range of a tensor.
struct ManifestTensor {
  std::string key;             // "model/model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // global, logical
  int64_t begin = 0;           // flat elements [begin, end) of it
  int64_t end = 0;
  std::string sha256;  // of those fp32 values
};

struct ManifestFile {
  std::string name;  // in the checkpoint's folder
  uint64_t bytes = 0;
  std::string sha256;
  std::vector<ManifestTensor> tensors;  // empty for files that are no shard
};

struct Manifest {
  int64_t step = 0;
  int64_t tokens = 0;
  int64_t world = 1;     // ranks that wrote it; any number may read it
  int64_t sequence = 0;  // counts the saves of a run folder: the largest is the newest
  int64_t created = 0;   // seconds since 1970
  std::map<std::string, std::string> fingerprints;  // of config, model, tokenizer, data, ...
  std::vector<ManifestFile> files;
  uint64_t bytes() const;  // of all files
};

// The text of manifest.json and back. The text ends in the SHA-256 of everything before it.
std::string format_manifest(const Manifest& manifest);
// Throws ExitCode::kNoCheckpoint naming `file` for any text that format_manifest did not write.
Manifest parse_manifest(std::string_view text, const std::string& file);
// Reads and parses <folder>/manifest.json.
Manifest read_manifest(const std::filesystem::path& folder);

// The JSON text of one entry of "files"; ranks send these to rank 0.
std::string format_manifest_file(const ManifestFile& file);
ManifestFile parse_manifest_file(std::string_view text, const std::string& file);

// Elements of a shape; -1 when the product does not fit in 62 bits or a size is negative.
int64_t checked_numel(const std::vector<int64_t>& shape);

}  // namespace sbtrain
