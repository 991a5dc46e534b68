// A file that only grows, record by record.
#pragma once

#include <string>
#include <string_view>

namespace sbtrain {

// Records reach the kernel when append() returns, so they outlive a killed process. A record that
// could not be written whole (disk full) is cut off again, so the file holds whole records only.
class AppendFile {
 public:
  enum class Mode {
    kAppend,  // create or go on
    kCreate,  // the file must not exist
  };
  // Throws ExitCode::kStorage with the path and the reason.
  AppendFile(const std::string& path, Mode mode);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  // Throws ExitCode::kStorage; later calls may succeed again.
  void append(std::string_view record);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace sbtrain
