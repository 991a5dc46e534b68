// Files that appear whole under their name or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace sbtrain {

// A file descriptor that closes itself.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }
  void reset() noexcept;
  int get() const { return fd_; }

 private:
  int fd_;
};

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
  UniqueFd fd_;
  bool committed_ = false;
};

}  // namespace sbtrain
