// Bytes that are read once, from the first to the last: files, pipes, and what is decompressed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/file_descriptor.h"

namespace sbtrain {

class ByteSource {
 public:
  ByteSource() = default;
  virtual ~ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  // Reads 1 to `bytes` bytes into `out`; returns their number, and 0 only at the end. Throws
  // ExitCode::kData, with the name of the input, for what cannot be read.
  virtual size_t read(char* out, size_t bytes) = 0;
};

// Thrown by a read that waits for input when it is told to stop.
struct ReadingStopped {};

// Reads a file or pipe. A read that waits for more input ends with ReadingStopped within 0.1 s
// after `stop` has been set, because the other end of a pipe may stay silent for ever.
class DescriptorSource : public ByteSource {
 public:
  // `name` is for messages, and `stop` has to live as long as the object.
  DescriptorSource(FileDescriptor fd, std::string name, const std::atomic<bool>& stop)
      : fd_(std::move(fd)), name_(std::move(name)), stop_(stop) {}
  size_t read(char* out, size_t bytes) override;

  // Bytes read so far. May be called by any thread.
  int64_t position() const { return position_; }

 private:
  FileDescriptor fd_;
  std::string name_;
  const std::atomic<bool>& stop_;
  std::atomic<int64_t> position_ = 0;
};

// Shows the next bytes of a source before they are read.
class PeekSource : public ByteSource {
 public:
  explicit PeekSource(std::unique_ptr<ByteSource> source) : source_(std::move(source)) {}
  size_t read(char* out, size_t bytes) override;

  // The next `bytes` bytes, or all that are left where there are fewer. Valid until the next call.
  std::string_view peek(size_t bytes);

 private:
  std::unique_ptr<ByteSource> source_;
  std::string buffer_;
  size_t at_ = 0;  // from here on the buffer has not been read
};

// Reads `source` on a thread of its own, up to 4 MiB ahead. Where no thread can be started, this is
// `source` itself. The destructor waits for a read of the source in progress.
std::unique_ptr<ByteSource> read_ahead(std::unique_ptr<ByteSource> source);

}  // namespace sbtrain
