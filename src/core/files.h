// Opening input files and replacing output files, for the whole program.
//
// Inputs are regular files and nothing else: opening a FIFO could wait for a writer for ever, and a
// device may never end. Outputs appear under their name complete or not at all. They replace only
// regular files, never a device or FIFO, and never a file that the same command reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/file_descriptor.h"

namespace sbtrain {

// Called before every operation; returns 0, or the errno with which the operation is to fail. Tests
// simulate a full disk with it, or kill the process at a chosen moment.
using IoHook = std::function<int(std::string_view operation, const std::filesystem::path& path)>;

// Whether something is at `path`; false as well where that cannot be told.
bool is_there(const std::filesystem::path& path);

// ---- reading

// Opens a regular file and never waits. Throws `code` with the file, the reason and `hint` when the
// file is missing or unreadable, or is a folder, FIFO, device or socket.
FileDescriptor open_input(const std::filesystem::path& path, ExitCode code,
                          std::string_view hint = "");

// The content of a regular file. Throws `code` as open_input does, and for more than `max_bytes`.
std::string read_input(const std::filesystem::path& path, ExitCode code, std::string_view hint = "",
                       size_t max_bytes = size_t{1} << 30);

// The same for callers that word or collect problems themselves: reads at most `max_bytes` bytes;
// when nothing could be read, `problem` says why.
std::string try_read_input(const std::filesystem::path& path, size_t max_bytes,
                           std::string& problem);

// ---- writing: every failure throws ExitCode::kStorage with the path and the system's reason

// Makes the folder and its missing parents; it may exist already. What is made survives a power
// failure.
void make_folders(const std::filesystem::path& folder);
// Makes the folder in one that exists; it may exist already.
void make_folder(const std::filesystem::path& folder);

// fsync of a folder, after which the names in it survive a power failure.
void sync_folder(const std::filesystem::path& folder);
// The same for the folder that `path` is in. One that this process may not read is left out, since
// it cannot be opened.
void sync_entry(const std::filesystem::path& path);

// What becomes of the missing folders of a file that is written. Of a path that a user gives only
// the last folder is made, in one that exists and is not the root of all: more than that is missing
// where the path is mistyped. Where a folder may be moved away by somebody else, as that of a run,
// writing must not make it again: kError.
enum class MissingFolders : uint8_t { kMakeLast, kMakeAll, kError };

// Throws ExitCode::kUsage when folders of an output are missing that kMakeLast does not make.
void check_folder_of(const std::filesystem::path& output);

// A file that is written beside its final place, as PATH.tmp. commit() gives it its name; without
// commit() it is removed. A symbolic link is kept, and the file that it points to is replaced. A
// PATH.tmp that a killed process left is replaced; one that another process is writing is an error.
class AtomicFile {
 public:
  // Throws ExitCode::kUsage, before anything is written, when `path` exists and is not a regular
  // file, when folders are missing that are not made, or when another process is writing it.
  explicit AtomicFile(std::filesystem::path path, IoHook hook = {},
                      MissingFolders missing = MissingFolders::kMakeLast);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);  // appends
  void write(std::string_view text) { write(text.data(), text.size()); }
  // fsync of the file, rename, fsync of the folder.
  void commit();

  const std::filesystem::path& temporary() const { return temporary_; }
  // Open for reading and writing; may be used instead of write().
  int fd() const { return fd_.get(); }

 private:
  void before(std::string_view operation) const;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  IoHook hook_;
  FileDescriptor fd_;
  bool committed_ = false;
};

// Replaces a file so that a reader sees the old or the new content, never a part.
void replace_file(const std::filesystem::path& path, std::string_view content, IoHook hook = {},
                  MissingFolders missing = MissingFolders::kMakeLast);

// A file without a name in `folder`, open for reading and writing. It disappears with its
// descriptor, however the process ends.
FileDescriptor open_scratch(const std::filesystem::path& folder);

// Writes exactly `bytes` bytes at `offset`; throws ExitCode::kStorage. `path` is for messages.
void write_at(int fd, const std::filesystem::path& path, int64_t offset, const void* data,
              int64_t bytes);

// Throws ExitCode::kUsage when writing `output` would destroy one of `inputs`, whatever names or
// links lead to them, when `output` cannot be replaced, or when folders of it are missing beyond
// the last one (MissingFolders::kMakeLast).
void check_output(const std::filesystem::path& output, std::span<const std::string> inputs);

// Renames a file out of the way, to PATH.old or the first of PATH.old.2, PATH.old.3, ... that is
// free, and returns the new name. Nothing is ever overwritten.
std::filesystem::path set_aside(const std::filesystem::path& path);

}  // namespace sbtrain
