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
// what any other number wrote. docs/checkpoints.md describes the format, and
// docs/developers/checkpoints.md the protocol.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
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

class Control;

// ---- saving: checkpoint_save.cpp

// All that one rank puts into a checkpoint. The texts are taken from rank 0.
struct Snapshot {
  int64_t step = 0;
  int64_t tokens = 0;      // trained on so far
  int64_t last_good = -1;  // Manifest::last_good
  // This rank's ranges, f32 in the host's memory; padding between rows is left out when they are
  // written. A rank without any, such as one whose ranges another replica saves, writes no file.
  std::vector<TensorShard> tensors;
  std::shared_ptr<const void> memory;  // keeps the values alive
  std::function<void()> wait;          // returns once the values are there; empty: they are
  // Called by rank 0 before the checkpoint becomes valid, to flush files that must not be older.
  std::function<void()> before_commit{};
  // If set, the values come from here instead of TensorShard::stored: logical flat elements
  // [begin, end) of the tensor. Called by several threads at once.
  std::function<void(const TensorShard& tensor, int64_t begin, int64_t end, float* out)> read{};
  std::string state_json;   // loader, schedule and stage counters, seeds; not interpreted
  std::string config_yaml;  // resolved
  std::map<std::string, std::string> fingerprints;
};

// The ranks that save together. `exchange` returns the texts of all ranks in rank order, the
// same on every rank, and returns only after all ranks have called it. Saving in the background
// needs a group whose traffic is separate from that of training.
struct RankGroup {
  int rank = 0;
  int world = 1;
  std::function<std::vector<std::string>(std::string)> exchange;  // may be empty for a world of 1
};
// All ranks of the job. The exchanges are of a topic of their own, so that a save in the background
// does not mix with what training exchanges.
RankGroup make_rank_group(Control& control);

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

// Whether a folder is there no more: a run that saves removes its oldest checkpoints, at any moment
// of those who read them.
bool is_gone(const std::filesystem::path& folder);

// The checkpoints of a run, newest save first. Only their manifests are read. Those that the run
// removes meanwhile are left out.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& run);

// ---- reading: checkpoint_reader.cpp

enum class Verification : uint8_t {
  kFull,    // sizes and checksums of all bytes, before the constructor returns
  kOnRead,  // the data of tensors is verified when it is read, so that each byte is read once
};

class CheckpointReader {
 public:
  // Verifies the checkpoint. Throws ExitCode::kNoCheckpoint naming file and tensor.
  explicit CheckpointReader(const std::filesystem::path& folder,
                            Verification verification = Verification::kFull);

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return *manifest_; }
  const std::string& state_json() const { return state_json_; }
  const std::string& config_yaml() const { return config_yaml_; }

  // From now on the average of the weights (train.ema) is what is read as the weights. Throws
  // ExitCode::kConfig if there is none: the checkpoint is whole, and none older is to replace it.
  void use_average();

  // A tensor is named by its kind, kModelKind or a state of the optimizer, and its parameter.
  bool has(std::string_view kind, std::string_view name) const;
  // Global shape. Throws when the checkpoint has no such tensor.
  const std::vector<int64_t>& shape(std::string_view kind, std::string_view name) const;
  std::vector<std::string> names(std::string_view kind) const;  // in alphabetical order
  std::vector<std::string> kinds() const;                       // likewise

  // Reads flat elements [begin, end) of a tensor, whichever ranks wrote them.
  void read(std::string_view kind, std::string_view name, int64_t begin, int64_t end,
            float* out) const;
  // Fills f32 shards in the host's memory, whichever ranks wrote their elements, with several
  // threads. Padding between rows is not touched.
  void read(std::span<const TensorShard> shards) const;

 private:
  // What a shard's file holds of a tensor.
  struct Piece {
    int64_t begin = 0;
    int64_t end = 0;
    size_t shard = 0;
    const ManifestTensor* manifest = nullptr;
    const SafetensorsEntry* entry = nullptr;
    std::unique_ptr<std::atomic<bool>[]> verified;  // by chunk
  };
  struct StoredTensor {
    std::vector<int64_t> shape;
    std::vector<Piece> pieces;  // by begin; they cover the tensor exactly
  };
  // The part of a chunk that a shard needs.
  struct ChunkRead {
    const Piece* piece;
    int64_t chunk;
    const TensorShard* to;  // null: the chunk is only verified
    int64_t from, end;      // flat elements of the tensor
  };
  void open_shard(const ManifestFile& file);
  void check_coverage();
  void verify_data() const;
  void add_reads(const TensorShard& shard, std::vector<ChunkRead>& reads) const;
  void read_chunk(const ChunkRead& read) const;
  const StoredTensor& stored(const std::string& key) const;
  std::string key(std::string_view kind, std::string_view name) const;

  std::filesystem::path folder_;
  std::unique_ptr<const Manifest> manifest_;  // pieces point into it
  std::string state_json_;
  std::string config_yaml_;
  std::string weights_ = kModelKind;      // the kind that is read as the weights
  std::deque<SafetensorsReader> shards_;  // likewise
  std::map<std::string, StoredTensor, std::less<>> tensors_;  // "kind/name"
};

// Everything that is wrong with a checkpoint, naming file and tensor; empty: it is good.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& folder);

// ---- choosing the one to read: checkpoint_find.cpp

// What <run>/checkpoints/latest holds, up to 64 bytes. Throws if it cannot be read.
std::string latest_text(const std::filesystem::path& run);

// What is wrong with <run>/checkpoints/latest; empty: nothing, or there is none.
std::string verify_latest(const std::filesystem::path& run);

// Reads what is needed of a checkpoint that is about to be chosen, such as load_params. What it
// throws with ExitCode::kNoCheckpoint refuses the checkpoint, so that the next older one is tried:
// damage may show only when data is read.
using UseCheckpoint = std::function<void(const CheckpointReader&)>;

// The newest whole checkpoint of a run, the same on all ranks of `group`, which call this together:
// a checkpoint that one of them refuses is refused by all. With `use` the data is verified where
// `use` reads it, otherwise all of it is. Refused checkpoints are logged with the reason (and
// appended to `refused` if given). Returns nothing if the run has no checkpoints at all; throws
// ExitCode::kNoCheckpoint if it has some and all are refused.
std::optional<CheckpointReader> open_newest(const std::filesystem::path& run,
                                            std::vector<std::string>* refused = nullptr,
                                            const UseCheckpoint& use = {},
                                            const RankGroup& group = {});

// The newest whole one of the saves after number `sequence`; nothing if there is none.
std::optional<CheckpointReader> open_newest_after(const std::filesystem::path& run,
                                                  int64_t sequence);

// The largest sequence number of a run's checkpoints; 0 without any.
int64_t last_sequence(const std::filesystem::path& run);

// Recognised by its manifest, or by its name if the manifest is gone.
bool is_checkpoint_folder(const std::filesystem::path& path);

// The checkpoint in a checkpoint folder, or the newest good one of a run folder. Throws
// ExitCode::kNoCheckpoint if there is none.
CheckpointReader open_checkpoint(const std::filesystem::path& path, const UseCheckpoint& use = {},
                                 const RankGroup& group = {});

// The checkpoint that `--checkpoint.resume` asks for: "auto" is open_newest, "none" is nothing,
// "last-good" the one that the newest manifest names as such, digits are a step of this run, and
// anything else is a path for open_checkpoint. Throws ExitCode::kNoCheckpoint if there is none.
std::optional<CheckpointReader> resume_checkpoint(const std::filesystem::path& run,
                                                  std::string_view resume,
                                                  const UseCheckpoint& use = {},
                                                  const RankGroup& group = {});

}  // namespace sbtrain
