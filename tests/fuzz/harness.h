// What the harnesses share. A reader may refuse its input with an Error; anything else that it
// throws ends the harness, as a crash does.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/error.h"

namespace sbtrain::test {

template <typename Read>
void may_refuse(const Read& read) {
  try {
    read();
  } catch (const Error&) {
  }
}

// A regular file in memory.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view content) : fd_(memfd_create("input", 0)) {
    for (size_t done = 0; done < content.size();) {
      const ssize_t n = ::write(fd_, content.data() + done, content.size() - done);
      if (n <= 0) break;
      done += static_cast<size_t>(n);
    }
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

}  // namespace sbtrain::test

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
