#include "text/decompress.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr size_t kInputBytes = size_t{256} << 10;
constexpr uint64_t kUnsuspectedBytes = uint64_t{8} << 20;
constexpr uint64_t kMostExpansion = 250;
constexpr int kWindowLog = 27;  // 128 MiB, the most that `zstd` decompresses without --long

// What both formats share: the compressed bytes at hand, and the count of both sides.
class Decompressor : public ByteSource {
 public:
  Decompressor(std::unique_ptr<ByteSource> source, std::string name, const char* format)
      : source_(std::move(source)), name_(std::move(name)), format_(format) {}

  size_t read(char* out, size_t bytes) final {
    const size_t got = decompress(out, bytes);
    produced_ += got;
    if (produced_ > kUnsuspectedBytes && produced_ / kMostExpansion > consumed_) {
      fail(ExitCode::kData,
           "{}: {} data that expands to more than {} times its length, as no text does", name_,
           format_, kMostExpansion);
    }
    return got;
  }

 protected:
  // Decompresses 1 to `bytes` bytes; returns 0 at the end.
  virtual size_t decompress(char* out, size_t bytes) = 0;

  // Compressed bytes that are not consumed yet; empty at the end of the source.
  std::string_view input() {
    if (at_ == size_) {
      buffer_.resize(kInputBytes);
      at_ = 0;
      size_ = source_->read(buffer_.data(), buffer_.size());
    }
    return std::string_view(buffer_).substr(at_, size_ - at_);
  }
  void consume(size_t bytes) {
    at_ += bytes;
    consumed_ += bytes;
  }

  [[noreturn]] void refuse(std::string_view problem) const {
    fail(ExitCode::kData, "{}: {}: {}", name_, format_, problem);
  }
  [[noreturn]] void refuse_end() const {
    refuse("the data ends too early; the file was cut short, fetch or write it again");
  }

 private:
  std::unique_ptr<ByteSource> source_;
  std::string name_;
  const char* format_;
  std::string buffer_;
  size_t at_ = 0;
  size_t size_ = 0;
  uint64_t consumed_ = 0;
  uint64_t produced_ = 0;
};

class GzipSource final : public Decompressor {
 public:
  GzipSource(std::unique_ptr<ByteSource> source, std::string name)
      : Decompressor(std::move(source), std::move(name), "gzip") {
    constexpr int kGzipOnly = 16;  // added to the size of the window
    if (inflateInit2(&stream_, MAX_WBITS + kGzipOnly) != Z_OK) {
      fail(ExitCode::kOutOfMemory, "there is no memory to decompress gzip data");
    }
  }
  ~GzipSource() override { inflateEnd(&stream_); }

 private:
  size_t decompress(char* out, size_t bytes) override {
    const auto wanted = static_cast<uInt>(std::min<size_t>(bytes, UINT_MAX));
    while (in_member_ || next_member()) {
      const std::string_view data = input();
      if (data.empty()) refuse_end();
      // zlib does not write to its input, but its interface predates const.
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));
      stream_.avail_in = static_cast<uInt>(data.size());
      stream_.next_out = reinterpret_cast<Bytef*>(out);
      stream_.avail_out = wanted;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      consume(data.size() - stream_.avail_in);
      in_member_ = result != Z_STREAM_END;
      if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
        refuse(fmt::format("damaged data ({})", stream_.msg ? stream_.msg : "no reason given"));
      }
      if (stream_.avail_out < wanted) return wanted - stream_.avail_out;
    }
    return 0;
  }

  // Begins the next member; returns false if there is none.
  bool next_member() {
    while (true) {
      const std::string_view data = input();
      if (data.empty()) return false;
      const size_t zeros = std::min(data.find_first_not_of('\0'), data.size());
      padded_ = padded_ || zeros > 0;
      consume(zeros);
      if (zeros == data.size()) continue;
      if (padded_ || data[0] != '\x1f') refuse("other bytes follow the data");
      inflateReset(&stream_);
      return in_member_ = true;
    }
  }

  z_stream stream_{};
  bool in_member_ = false;
  bool padded_ = false;  // zeros followed a member
};

class ZstdSource final : public Decompressor {
 public:
  ZstdSource(std::unique_ptr<ByteSource> source, std::string name)
      : Decompressor(std::move(source), std::move(name), "zstd"), stream_(ZSTD_createDStream()) {
    if (!stream_) fail(ExitCode::kOutOfMemory, "there is no memory to decompress zstd data");
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, kWindowLog);
  }

 private:
  struct Free {
    void operator()(ZSTD_DStream* stream) const noexcept { ZSTD_freeDStream(stream); }
  };

  size_t decompress(char* out, size_t bytes) override {
    while (true) {
      const std::string_view data = input();
      ZSTD_inBuffer in{.src = data.data(), .size = data.size(), .pos = 0};
      ZSTD_outBuffer result{.dst = out, .size = bytes, .pos = 0};
      // At the end of the input, output that did not fit before may still be waiting.
      if (data.empty() && !in_frame_) return 0;
      const size_t left = ZSTD_decompressStream(stream_.get(), &result, &in);
      if (ZSTD_isError(left)) refuse(fmt::format("damaged data ({})", ZSTD_getErrorName(left)));
      consume(in.pos);
      in_frame_ = left != 0;
      if (result.pos > 0) return result.pos;
      if (data.empty() && in_frame_) refuse_end();
    }
  }

  std::unique_ptr<ZSTD_DStream, Free> stream_;
  bool in_frame_ = false;
};

}  // namespace

Compression compression_of(std::string_view head) {
  if (head.starts_with("\x1f\x8b")) return Compression::kGzip;
  if (head.starts_with("\x28\xb5\x2f\xfd")) return Compression::kZstd;
  // A skippable frame, with which some tools begin a Zstandard file: 0x184d2a50 to 0x184d2a5f.
  const bool skippable = head.size() >= 4 && (static_cast<uint8_t>(head[0]) & 0xf0) == 0x50 &&
                         head.substr(1, 3) == "\x2a\x4d\x18";
  return skippable ? Compression::kZstd : Compression::kNone;
}

std::unique_ptr<ByteSource> decompress(Compression compression, std::unique_ptr<ByteSource> source,
                                       const std::string& name) {
  switch (compression) {
    case Compression::kGzip:
      return std::make_unique<GzipSource>(std::move(source), name);
    case Compression::kZstd:
      return std::make_unique<ZstdSource>(std::move(source), name);
    case Compression::kNone:
      break;
  }
  return source;
}

}  // namespace sbtrain
