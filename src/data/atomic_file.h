// Files that appear whole under their name or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/file_descriptor.h"

namespace sbtrain {

// Creates the parent folders of `path`. Throws ExitCode::kStorage.
void make_parent_folders(const std::string& path);

// fsync of the folder that holds `path`: a rename into it survives a power failure.
void sync_parent_folder(const std::string& path);

// Renames a finished temporary file to its name, for good. Throws ExitCode::kStorage.
void publish(const std::string& temporary, const std::string& path);

// Written as PATH.tmp, moved to PATH by commit(), removed if that never happens. Every failure
// throws ExitCode::kStorage with the file's name and the reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, size_t bytes);
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  FileDescriptor fd_;
  bool committed_ = false;
};

}  // namespace sbtrain
