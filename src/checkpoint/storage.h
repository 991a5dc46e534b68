// The file operations of checkpoints, on top of core/files.h. A hook can make each of them fail.
//
// Writing goes through Storage, which throws ExitCode::kStorage with the operation, the path and
// the system's reason. Reading goes through InputFile, which throws ExitCode::kNoCheckpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "core/file_descriptor.h"
#include "core/files.h"
#include "core/sha256.h"

namespace sbtrain {

class OutputFile;

class Storage {
 public:
  Storage() = default;
  explicit Storage(IoHook hook) : hook_(std::move(hook)) {}

  // Creates a file; an existing one is an error.
  OutputFile create(const std::filesystem::path& path) const;
  // Makes the folder and its missing parents; it may exist already.
  void make_folders(const std::filesystem::path& path) const;
  // Makes the folder in one that exists; it may exist already.
  void make_folder(const std::filesystem::path& path) const;
  // fsync, after which the names in the folder survive a power failure.
  void sync_folder(const std::filesystem::path& path) const;
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) const;
  // Swaps two folders in one step; false if the file system cannot.
  bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) const;
  // Removes whatever is at `path`; there may be nothing.
  void remove_tree(const std::filesystem::path& path) const;
  // Replaces a small file in a folder that exists, so that a reader sees the old or the new
  // content, never a part.
  void replace_file(const std::filesystem::path& path, std::string_view content) const;

 private:
  friend class OutputFile;
  int injected(std::string_view operation, const std::filesystem::path& path) const;
  void before(std::string_view operation, const std::filesystem::path& path) const;
  IoHook hook_;
  // One call of the hook at a time, from whichever thread.
  std::shared_ptr<std::mutex> hook_mutex_ = std::make_shared<std::mutex>();
};

// A new file. Its content is guaranteed only after finish().
class OutputFile {
 public:
  // Takes the disk space of the first `bytes` bytes, so that a full disk is noticed before anything
  // is written. File systems that cannot do this notice later.
  void reserve(uint64_t bytes);
  // Writes at `offset`. Several threads may write at the same time. The system begins to move the
  // bytes to the disk at once, so that finish() has little left to wait for.
  void write_at(uint64_t offset, const void* data, size_t bytes) const;
  // Flushes to the disk and closes, after which the content survives a power failure.
  void finish();
  const std::filesystem::path& path() const { return path_; }

 private:
  friend class Storage;
  OutputFile(Storage storage, std::filesystem::path path);
  Storage storage_;
  std::filesystem::path path_;
  FileDescriptor fd_;
};

// An existing regular file, read at any offset.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  uint64_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }
  // Reads exactly `bytes` bytes; fewer are an error.
  void read(uint64_t offset, void* out, uint64_t bytes) const;
  // SHA-256 of the bytes [offset, offset + bytes).
  std::string sha256(uint64_t offset, uint64_t bytes) const;

 private:
  std::filesystem::path path_;
  FileDescriptor fd_;
  uint64_t size_ = 0;
};

}  // namespace sbtrain
