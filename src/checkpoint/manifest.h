// manifest.json: what a checkpoint consists of. It is written last, carries its own checksum, and
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

// Increased when the layout changes in a way that older programs cannot read. Version 1 is read
// too: there `sha256` of a file covers all of it, and a tensor's data is one chunk of any size.
inline constexpr int64_t kCheckpointVersion = 2;

// The data of a tensor's range is hashed in chunks of this size, the last one shorter: small enough
// that threads share the work evenly, and large enough that a manifest stays small.
inline constexpr uint64_t kChunkBytes = uint64_t{8} << 20;

// One rank's range of a tensor.
struct ManifestTensor {
  std::string key;             // "model/model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // global, logical
  int64_t begin = 0;           // flat elements [begin, end) of it
  int64_t end = 0;
  std::vector<std::string> sha256;  // of each chunk of those fp32 values
};

struct ManifestFile {
  std::string name;  // in the checkpoint's folder
  uint64_t bytes = 0;
  std::string sha256;  // of all that is no tensor's data: a shard's header, any other file whole
  std::vector<ManifestTensor> tensors;  // empty for files other than shards
};

struct Manifest {
  int64_t version = kCheckpointVersion;
  int64_t step = 0;
  int64_t tokens = 0;
  int64_t world = 1;     // ranks that wrote it; any number may read it
  int64_t sequence = 0;  // counts the saves of a run folder: the largest is the newest
  int64_t created = 0;   // seconds since 1970
  // The step of the newest checkpoint that was known to be good when this one was saved, of those
  // that this one continues: a step from its weights has been applied since. -1: none was.
  int64_t last_good = -1;
  std::map<std::string, std::string> fingerprints;  // of config, model, tokenizer, data, ...
  std::vector<ManifestFile> files;
  uint64_t bytes() const;  // of all files
};

// Saves are counted up to this number, beyond which a manifest is refused. A file with a number
// close to the end of its type could not be followed by a newer one.
inline constexpr int64_t kMaxSequence = int64_t{1} << 53;

// The number of chunks of a range of `bytes` bytes.
constexpr int64_t chunk_count(uint64_t bytes) {
  return static_cast<int64_t>((bytes + kChunkBytes - 1) / kChunkBytes);
}

// The text of manifest.json, which ends in the SHA-256 of everything before it.
std::string format_manifest(const Manifest& manifest);
// The reverse. Throws ExitCode::kNoCheckpoint naming `file` for any text that format_manifest did
// not write.
Manifest parse_manifest(std::string_view text, const std::string& file);
// Reads and parses <folder>/manifest.json.
Manifest read_manifest(const std::filesystem::path& folder);

// The JSON text of one entry of "files"; ranks send these to rank 0.
std::string format_manifest_file(const ManifestFile& file);
ManifestFile parse_manifest_file(std::string_view text, const std::string& file);

// The number of elements of a shape; -1 if a size is negative or the product reaches 2^61, so that
// sizes in bytes stay within 64 bits.
int64_t checked_numel(const std::vector<int64_t>& shape);

}  // namespace sbtrain
