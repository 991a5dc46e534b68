// What a program has done to the files below a folder, as file_recorder.cpp writes it down, and
// what a disk may hold after a power failure at any moment of that.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace sbtrain::test {

// The recorder reads these: the folder, and the file that it appends to.
inline constexpr const char* kRootVariable = "RECORDED_FOLDER";
inline constexpr const char* kHistoryVariable = "RECORDED_HISTORY";

enum class FileOperation : uint32_t {
  kCreate,      // the file `first`
  kMakeFolder,  // `first`
  kWrite,       // `first` at byte `number`
  kResize,      // to `number` bytes
  kFlush,       // fsync or fdatasync of a file or folder
  kRename,      // `first` to `second`
  kExchange,    // of `first` and `second`
  kRemove,      // the file or folder `first`
};

// A record: the head, `first` bytes and `second` bytes. Paths are relative to the folder; files
// that are open are known by their inodes, since they may have another name meanwhile.
struct OperationHead {
  FileOperation operation = FileOperation::kCreate;
  uint64_t inode = 0;
  uint64_t number = 0;
  uint64_t first = 0;
  uint64_t second = 0;
};

struct RecordedOperation {
  FileOperation operation = FileOperation::kCreate;
  uint64_t inode = 0;
  uint64_t number = 0;
  std::string first;
  std::string second;
};

std::vector<RecordedOperation> read_history(const std::filesystem::path& file);

// What survives of what has not been flushed.
enum class Survival : uint8_t {
  kAll,    // everything, in the order in which it was done
  kNames,  // names and sizes, but no data: bytes that were not flushed are zero
  kNothing,
};

// A file system in memory.
class RecordedFiles {
 public:
  // `root`: the recorded folder, which is empty and on the disk.
  explicit RecordedFiles(const std::filesystem::path& root);
  void apply(const RecordedOperation& operation);
  // Makes the folder `target` what the recorded one is after a power failure.
  void write(const std::filesystem::path& target, Survival survival) const;
  // The content of a file as the program sees it; "" if there is none.
  std::string content(const std::string& path) const;
  bool is(const std::string& path, uint64_t inode) const;

 private:
  struct Node {
    bool folder = false;
    std::string data{}, flushed{};
    std::map<std::string, size_t> names{}, flushed_names{};
  };
  size_t find(const std::filesystem::path& path) const;  // its place in nodes_, or that of the root
  std::map<std::string, size_t>& names_beside(const std::string& path);
  void add(const RecordedOperation& operation, bool folder);
  void write(size_t node, const std::filesystem::path& target, Survival survival) const;

  std::vector<Node> nodes_;  // the root is the first
  std::map<uint64_t, size_t> by_inode_;
};

}  // namespace sbtrain::test
