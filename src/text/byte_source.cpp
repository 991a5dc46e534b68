#include "text/byte_source.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace sbtrain {

size_t DescriptorSource::read(char* out, size_t bytes) {
  while (true) {
    if (stop_) throw ReadingStopped{};
    pollfd wait{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&wait, 1, 100) <= 0) continue;
    const ssize_t got = ::read(fd_.get(), out, bytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) fail(ExitCode::kData, "{}: cannot read: {}", name_, std::strerror(errno));
    position_ += got;
    return static_cast<size_t>(got);
  }
}

size_t PeekSource::read(char* out, size_t bytes) {
  if (at_ == buffer_.size()) return source_->read(out, bytes);
  bytes = std::min(bytes, buffer_.size() - at_);
  std::memcpy(out, buffer_.data() + at_, bytes);
  at_ += bytes;
  return bytes;
}

std::string_view PeekSource::peek(size_t bytes) {
  buffer_.erase(0, at_);
  at_ = 0;
  while (buffer_.size() < bytes) {
    const size_t before = buffer_.size();
    buffer_.resize(bytes);
    const size_t got = source_->read(buffer_.data() + before, bytes - before);
    buffer_.resize(before + got);
    if (got == 0) break;
  }
  return std::string_view(buffer_).substr(0, bytes);
}

namespace {

class ReadAhead : public ByteSource {
 public:
  // Throws std::system_error, and leaves `source` alone, if no thread can be started.
  explicit ReadAhead(std::unique_ptr<ByteSource>& source) : thread_([this] { produce(); }) {
    const std::lock_guard lock(mutex_);
    source_ = std::move(source);
    changed_.notify_all();
  }

  ~ReadAhead() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  size_t read(char* out, size_t bytes) override {
    if (at_ == block_.size() && !next_block()) return 0;
    bytes = std::min(bytes, block_.size() - at_);
    std::memcpy(out, block_.data() + at_, bytes);
    at_ += bytes;
    return bytes;
  }

 private:
  static constexpr size_t kBlockBytes = size_t{1} << 20;
  static constexpr size_t kBlocks = 4;

  bool next_block() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !blocks_.empty() || ended_; });
    if (blocks_.empty()) {
      if (error_) std::rethrow_exception(error_);
      return false;
    }
    block_ = std::move(blocks_.front());
    at_ = 0;
    blocks_.pop_front();
    lock.unlock();
    changed_.notify_all();
    return true;
  }

  void produce() {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return source_ != nullptr || stop_; });
    }
    std::exception_ptr error;
    try {
      while (produce_block()) {
      }
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    error_ = error;
    ended_ = true;
    changed_.notify_all();
  }

  // Returns false at the end of the source, or when the object is being destroyed.
  bool produce_block() {
    std::string block(kBlockBytes, '\0');
    size_t filled = 0;
    size_t got = 1;
    while (filled < kBlockBytes && got > 0) {
      got = source_->read(block.data() + filled, kBlockBytes - filled);
      filled += got;
    }
    block.resize(filled);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return blocks_.size() < kBlocks || stop_; });
    if (stop_) return false;
    if (filled > 0) blocks_.push_back(std::move(block));
    lock.unlock();
    changed_.notify_all();
    return got > 0;
  }

  std::unique_ptr<ByteSource> source_;  // used by the thread alone, once it is set
  std::string block_;                   // being read
  size_t at_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::string> blocks_;
  bool ended_ = false;
  bool stop_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<ByteSource> read_ahead(std::unique_ptr<ByteSource> source) {
  try {
    return std::make_unique<ReadAhead>(source);
  } catch (const std::system_error&) {
    return source;
  }
}

}  // namespace sbtrain
