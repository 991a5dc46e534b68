// Checkpoints: what a run needs to continue bit for bit. They are saved so that a crash at any
// moment leaves the old or the new one whole, and verified before any of their content is used.
//
//   <run>/checkpoints/step-00000100/rank-00000-of-00001.safetensors   fp32 tensors of one rank
//                                   state.json                        the trainer's counters
//                                   config.yaml                       the resolved configuration
//                                   manifest.json                     sizes and checksums, last
//   <run>/checkpoints/latest                                          "step-00000100"
//
// A rank stores flat ranges of each tensor's logical elements, so that any number of ranks can read
// what any other number wrote. docs/checkpoints.md describes format and protocol.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/storage.h"
#include "parallel/tensor_range.h"

namespace sbtrain {

class Communicator;

// ---- saving: checkpoint_save.cpp

// An owned copy of a shard.
struct SnapshotTensor : TensorRange {
  std::vector<float> values;  // end - begin
};

// All that one rank puts into a checkpoint. The texts are taken from rank 0.
struct Snapshot {
  int64_t step = 0;
  int64_t tokens = 0;      // trained on so far
  int64_t last_good = -1;  // Manifest::last_good
  std::vector<SnapshotTensor> tensors;
  std::string state_json;   // loader, schedule and stage counters, seeds; not interpreted
  std::string config_yaml;  // resolved
  std::map<std::string, std::string> fingerprints;
};

// Copies the shards (f32, in the host's memory) into the snapshot with all threads. The snapshot's
// memory from an earlier copy is reused.
void copy_tensors(std::span<const TensorShard> shards, Snapshot& snapshot);

// The ranks that save together. `exchange` returns the texts of all ranks in rank order, the
// same on every rank, and returns only after all ranks have called it. Saving in the background
// needs a group whose traffic is separate from that of training.
struct RankGroup {
  int rank = 0;
  int world = 1;
  std::function<std::vector<std::string>(std::string)> exchange;  // may be empty for a world of 1
};
RankGroup make_rank_group(Communicator& communicator);

struct SavedCheckpoint {
  std::filesystem::path folder;
  uint64_t bytes = 0;  // all ranks, without the manifest
};

// Saves and commits; all ranks call it. The ranks write and flush their shards in step-N.tmp; after
// a barrier follow the manifest, the rename to step-N and `latest`, each flushed; then all are
// removed but the `keep` newest checkpoints and that of step snapshot.last_good. An existing step-N
// is replaced whole, never changed. A failure on any rank throws ExitCode::kStorage on all, removes
// step-N.tmp and leaves older checkpoints as they were. The run folder must exist: one that has
// been moved away is not made again.
SavedCheckpoint save_checkpoint(const Storage& storage, const std::filesystem::path& run,
                                const Snapshot& snapshot, const RankGroup& group, int64_t keep);

// Removes what a crash has left (step-*.tmp) and makes `latest` name the newest checkpoint. Only
// the holder of the run's lock may call it.
void clean_up_checkpoints(const Storage& storage, const std::filesystem::path& run);

// ---- listing: checkpoint_find.cpp

struct CheckpointInfo {
  std::filesystem::path folder;
  int64_t step = 0;     // from the folder's name
  Manifest manifest;    // valid if problem is empty
  std::string problem;  // why the manifest is refused
};

// The checkpoints of a run, newest save first. Only their manifests are read.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& run);

// ---- reading: checkpoint_reader.cpp

enum class Verification : uint8_t {
  kFull,     // sizes and SHA-256 of every file: reads everything once
  kHeaders,  // manifest, sizes and shard headers: when rank 0 does kFull
};

class CheckpointReader {
 public:
  // Verifies the checkpoint. Throws ExitCode::kNoCheckpoint naming file and tensor.
  explicit CheckpointReader(const std::filesystem::path& folder,
                            Verification verification = Verification::kFull);

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  const std::string& state_json() const { return state_json_; }
  const std::string& config_yaml() const { return config_yaml_; }

  bool has(TensorKind kind, std::string_view name) const;
  // Global shape. Throws when the checkpoint has no such tensor.
  const std::vector<int64_t>& shape(TensorKind kind, std::string_view name) const;
  std::vector<std::string> names(TensorKind kind) const;  // in alphabetical order

  // Reads flat elements [begin, end) of a tensor, whichever ranks wrote them. `row_stride` is that
  // of TensorShard: if rows are stored padded in `out`, their distance (the padding is not
  // touched).
  void read(TensorKind kind, std::string_view name, int64_t begin, int64_t end, float* out,
            int64_t row_stride = 0) const;

 private:
  struct Piece {
    int64_t begin = 0;
    int64_t end = 0;
    size_t shard = 0;
  };
  struct StoredTensor {
    std::vector<int64_t> shape;
    std::vector<Piece> pieces;  // by begin; they cover the tensor exactly
  };
  void open_shard(const ManifestFile& file);
  void check_coverage();
  const StoredTensor& stored(const std::string& key) const;
  void read_flat(const std::string& key, int64_t begin, int64_t end, float* out) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  std::string state_json_;
  std::string config_yaml_;
  std::vector<SafetensorsReader> shards_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;  // "kind/name"
};

// Everything that is wrong with a checkpoint, naming file and tensor; empty: it is good.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& folder);

// ---- choosing the one to read: checkpoint_find.cpp

// What <run>/checkpoints/latest holds, up to 64 bytes. Throws if it cannot be read.
std::string latest_text(const std::filesystem::path& run);

// What is wrong with <run>/checkpoints/latest; empty: nothing, or there is none.
std::string verify_latest(const std::filesystem::path& run);

// The newest whole checkpoint of a run. Refused ones are logged with the reason (and appended to
// `refused` if given). Returns nothing if the run has no checkpoints at all; throws
// ExitCode::kNoCheckpoint if it has some and all are refused.
std::optional<CheckpointReader> open_newest(const std::filesystem::path& run,
                                            std::vector<std::string>* refused = nullptr);

// The newest whole one of the saves after number `sequence`; nothing if there is none.
std::optional<CheckpointReader> open_newest_after(const std::filesystem::path& run,
                                                  int64_t sequence);

// The largest sequence number of a run's checkpoints; 0 without any.
int64_t last_sequence(const std::filesystem::path& run);

// Recognised by its manifest, or by its name if the manifest is gone.
bool is_checkpoint_folder(const std::filesystem::path& path);

// The checkpoint in a checkpoint folder, or the newest good one of a run folder. Throws
// ExitCode::kNoCheckpoint if there is none.
CheckpointReader open_checkpoint(const std::filesystem::path& path);

// The checkpoint that `--checkpoint.resume` asks for: "auto" is open_newest, "none" is nothing,
// "last-good" the one that the newest manifest names as such, digits are a step of this run, and
// anything else is a path for open_checkpoint. Throws ExitCode::kNoCheckpoint if there is none.
std::optional<CheckpointReader> resume_checkpoint(const std::filesystem::path& run,
                                                  std::string_view resume);

}  // namespace sbtrain
