// A file that only grows, record by record.
#pragma once

#include <string>
#include <string_view>

namespace sbtrain {

// The kernel has a record when append() returns, so it survives the end of the process; after
// sync() it survives a power failure, too. A record that could be written only in part (disk full)
// is removed, so the file holds whole records only.
class AppendFile {
 public:
  enum class Mode {
    kAppend,  // create the file or append to it
    kCreate,  // the file must not exist
  };
  // Throws ExitCode::kStorage with the path and the reason.
  AppendFile(const std::string& path, Mode mode);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Throws ExitCode::kStorage; later calls may succeed again.
  void append(std::string_view record);
  // Flushes to the disk; may be called beside append(). Throws ExitCode::kStorage.
  void sync() const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace sbtrain
