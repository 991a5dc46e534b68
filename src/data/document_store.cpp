#include "data/document_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/error.h"
#include "core/host_threads.h"
#include "data/hdf5_file.h"

namespace sbtrain {
namespace {

static_assert(std::endian::native == std::endian::little,
              "stores are written as they lie in memory");

// The last bytes of a finished file.
struct Seal {
  std::array<char, 8> magic;
  uint64_t hdf5_bytes;     // size of the file without the seal
  uint64_t tokens_offset;  // where /tokens lies
  uint64_t tokens_bytes;
  Digest structure;  // of bytes [0, tokens_offset) and [tokens_offset + tokens_bytes, hdf5_bytes)
  Digest self;       // of all of the above
};
static_assert(sizeof(Seal) == 96);
constexpr std::array<char, 8> kMagic = {'S', 'B', 'T', 'S', 'E', 'A', 'L', '1'};
constexpr size_t kSealedBytes = offsetof(Seal, self);

[[noreturn]] void fail_io(ExitCode code, const char* operation, const std::string& path) {
  fail(code, "{}: cannot {}: {}", path, operation, std::strerror(errno));
}

// Exactly `bytes` bytes at `offset`.
void read_at(int fd, const std::string& path, int64_t offset, void* out, int64_t bytes) {
  char* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io(ExitCode::kData, "read", path);
    if (got == 0) fail(ExitCode::kData, "{}: truncated while in use, at byte {}", path, offset);
    to += got;
    offset += got;
    bytes -= got;
  }
}

int64_t file_size(int fd, const std::string& path, ExitCode code) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail_io(code, "examine", path);
  return status.st_size;
}

// SHA-256 of everything in the HDF5 part except the tokens.
Digest structure_digest(int fd, const std::string& path, const Seal& seal) {
  Sha256 digest;
  std::vector<char> buffer(1 << 20);
  const auto add = [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t bytes = std::min<int64_t>(end - begin, static_cast<int64_t>(buffer.size()));
      read_at(fd, path, begin, buffer.data(), bytes);
      digest.update(buffer.data(), static_cast<size_t>(bytes));
      begin += bytes;
    }
  };
  add(0, static_cast<int64_t>(seal.tokens_offset));
  add(static_cast<int64_t>(seal.tokens_offset + seal.tokens_bytes),
      static_cast<int64_t>(seal.hdf5_bytes));
  return digest.finish();
}

int64_t blocks_of(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes;
}

hid_t token_type(const StoreInfo& info) {
  return info.token_bytes() == 4 ? H5T_STD_U32LE : H5T_STD_U16LE;
}

// Completes the hash of all token bytes to the hash of the store's content.
std::string finish_content(Sha256& tokens, std::span<const uint64_t> offsets,
                           const StoreInfo& info) {
  tokens.update(offsets.data(), offsets.size_bytes());
  tokens.update(fmt::format("sbtrain documents v{} vocab {} tokens {} documents {}", kStoreVersion,
                            info.vocab, info.tokens, info.documents));
  return tokens.hex();
}

std::string sources_to_json(const std::vector<StoreSource>& sources) {
  nlohmann::json list = nlohmann::json::array();
  for (const StoreSource& s : sources) {
    list.push_back({{"name", s.name},
                    {"documents", s.documents},
                    {"tokens", s.tokens},
                    {"text_bytes", s.text_bytes}});
  }
  return list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<StoreSource> sources_from_json(const std::string& text, const std::string& path) {
  std::vector<StoreSource> sources;
  try {
    for (const auto& item : nlohmann::json::parse(text)) {
      sources.push_back(
          {item.at("name"), item.at("documents"), item.at("tokens"), item.at("text_bytes")});
    }
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::kData, "{}: attribute sources: {}", path, error.what());
  }
  return sources;
}

}  // namespace

// ---- Writing -------------------------------------------------------------------------------

DocumentWriter::DocumentWriter(std::string path, StoreInfo info)
    : path_(std::move(path)), file_(path_), info_(std::move(info)) {
  require(info_.vocab > 0, "a document store needs a vocabulary size");
  const std::filesystem::path folder = file_.temporary().parent_path();
  spool_ = open_scratch(folder.empty() ? "." : folder);
  block_.reserve(kBlockBytes);
}

void DocumentWriter::append(std::span<const int32_t> tokens, bool last) {
  const auto width = static_cast<size_t>(info_.token_bytes());
  for (const int32_t token : tokens) {
    require(token >= 0 && token < info_.vocab, "token {} in a vocabulary of {}", token,
            info_.vocab);
    const auto value = static_cast<uint32_t>(token);
    block_.insert(block_.end(), reinterpret_cast<const char*>(&value),
                  reinterpret_cast<const char*>(&value) + width);
    if (block_.size() == kBlockBytes) flush_block();
  }
  tokens_ += tokens.size();
  if (last) offsets_.push_back(tokens_);
}

void DocumentWriter::flush_block() {
  if (block_.empty()) return;
  const auto offset = static_cast<int64_t>(checksums_.size()) * kBlockBytes;
  write_at(spool_.get(), file_.temporary(), offset, block_.data(),
           static_cast<int64_t>(block_.size()));
  checksums_.push_back(sha256(block_.data(), block_.size()));
  content_.update(block_.data(), block_.size());
  block_.clear();
}

StoreInfo DocumentWriter::finish(std::vector<StoreSource> sources, int64_t text_bytes) {
  StoreInfo info = complete(std::move(sources), text_bytes);
  commit();
  return info;
}

void DocumentWriter::commit() {
  file_.commit();
}

StoreInfo DocumentWriter::complete(std::vector<StoreSource> sources, int64_t text_bytes) {
  flush_block();
  info_.documents = static_cast<int64_t>(offsets_.size()) - 1;
  info_.tokens = static_cast<int64_t>(offsets_.back());
  info_.sources = std::move(sources);
  info_.text_bytes = text_bytes;
  if (info_.tokens == 0) fail(ExitCode::kData, "{}: there are no tokens to write", path_);
  info_.content_hash = finish_content(content_, offsets_, info_);
  write_hdf5();
  return info_;
}

void DocumentWriter::write_hdf5() {
  int64_t tokens_offset = 0;
  {
    const Hdf5Lock lock;
    Hdf5Writer file(file_.temporary().string());
    file.attribute("format_version", kStoreVersion);
    file.attribute("vocab", info_.vocab);
    file.attribute("tokenizer_hash", info_.tokenizer_hash);
    file.attribute("bos", info_.bos);
    file.attribute("eos", info_.eos);
    file.attribute("starts_with_bos", static_cast<int64_t>(info_.starts_with_bos));
    file.attribute("ends_with_eos", static_cast<int64_t>(info_.ends_with_eos));
    file.attribute("documents", info_.documents);
    file.attribute("tokens", info_.tokens);
    file.attribute("text_bytes", info_.text_bytes);
    file.attribute("sources", sources_to_json(info_.sources));
    file.attribute("content_hash", info_.content_hash);
    file.attribute("completed", int64_t{1});
    file.dataset("doc_offsets", H5T_STD_U64LE, {offsets_.size()}, offsets_.data());
    file.dataset("token_checksums", H5T_STD_U8LE, {checksums_.size(), sizeof(Digest)},
                 checksums_.data());
    tokens_offset = file.reserve("tokens", token_type(info_), static_cast<hsize_t>(info_.tokens));
    file.close();
  }
  copy_tokens(tokens_offset);
  seal(tokens_offset);
}

void DocumentWriter::copy_tokens(int64_t offset) {
  std::vector<char> buffer(1 << 20);
  const int64_t total = info_.tokens * info_.token_bytes();
  for (int64_t at = 0; at < total;) {
    const int64_t bytes = std::min<int64_t>(total - at, static_cast<int64_t>(buffer.size()));
    read_at(spool_.get(), file_.temporary().string(), at, buffer.data(), bytes);
    write_at(file_.fd(), file_.temporary(), offset + at, buffer.data(), bytes);
    at += bytes;
  }
}

void DocumentWriter::seal(int64_t tokens_offset) {
  const std::string name = file_.temporary().string();
  const int fd = file_.fd();
  Seal seal{.magic = kMagic,
            .hdf5_bytes = static_cast<uint64_t>(file_size(fd, name, ExitCode::kStorage)),
            .tokens_offset = static_cast<uint64_t>(tokens_offset),
            .tokens_bytes = static_cast<uint64_t>(info_.tokens * info_.token_bytes()),
            .structure = {},
            .self = {}};
  seal.structure = structure_digest(fd, name, seal);
  seal.self = sha256(&seal, kSealedBytes);
  // The content is synced first, so that a seal on the disk implies all the bytes it covers.
  if (::fsync(fd) != 0) fail_io(ExitCode::kStorage, "sync", name);
  write_at(fd, name, static_cast<int64_t>(seal.hdf5_bytes), &seal, sizeof seal);
  if (::fsync(fd) != 0) fail_io(ExitCode::kStorage, "sync", name);
}

// ---- Reading -------------------------------------------------------------------------------

DocumentStore::DocumentStore(std::string path)
    : path_(std::move(path)),
      fd_(open_input(path_, ExitCode::kData, "; `sbtrain prepare` makes a store from text")),
      stamp_(stamp()) {
  check_seal();
  read_hdf5();
  check_offsets();
  checked_ = std::make_unique<std::atomic<uint32_t>[]>(checksums_.size());
}

DocumentStore::~DocumentStore() = default;

DocumentStore::Stamp DocumentStore::stamp() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail_io(ExitCode::kData, "examine", path_);
  const auto nanoseconds = [](const timespec& t) { return t.tv_sec * 1'000'000'000 + t.tv_nsec; };
  return {.bytes = status.st_size,
          .modified = nanoseconds(status.st_mtim),
          .changed = nanoseconds(status.st_ctim)};
}

void DocumentStore::check_seal() {
  const int64_t size = stamp_.bytes;
  Seal seal{};
  const auto seal_bytes = static_cast<int64_t>(sizeof seal);
  if (size >= seal_bytes) read_at(fd_.get(), path_, size - seal_bytes, &seal, seal_bytes);
  if (size < seal_bytes || seal.magic != kMagic) {
    fail(ExitCode::kData,
         "{}: unfinished, truncated or not made by sbtrain (the seal at its end is missing); run "
         "`sbtrain prepare` again",
         path_);
  }
  const auto limit = static_cast<uint64_t>(size - seal_bytes);
  if (sha256(&seal, kSealedBytes) != seal.self || seal.hdf5_bytes != limit ||
      seal.tokens_offset > limit || seal.tokens_bytes > limit - seal.tokens_offset ||
      structure_digest(fd_.get(), path_, seal) != seal.structure) {
    fail(ExitCode::kData,
         "{}: damaged (its contents do not match the checksum in its seal); copy it again or run "
         "`sbtrain prepare` again",
         path_);
  }
  hdf5_bytes_ = static_cast<int64_t>(seal.hdf5_bytes);
  tokens_offset_ = static_cast<int64_t>(seal.tokens_offset);
  tokens_bytes_ = static_cast<int64_t>(seal.tokens_bytes);
}

void DocumentStore::read_hdf5() {
  const Hdf5Lock lock;
  const Hdf5Reader file(path_);
  const int64_t version = file.integer("format_version");
  if (version != kStoreVersion) {
    fail(ExitCode::kData, "{}: format version {}; this sbtrain reads {}: run `sbtrain prepare`",
         path_, version, kStoreVersion);
  }
  info_.vocab = file.integer("vocab");
  info_.tokenizer_hash = file.text("tokenizer_hash");
  info_.bos = static_cast<int32_t>(file.integer("bos"));
  info_.eos = static_cast<int32_t>(file.integer("eos"));
  info_.starts_with_bos = file.integer("starts_with_bos") != 0;
  info_.ends_with_eos = file.integer("ends_with_eos") != 0;
  info_.documents = file.integer("documents");
  info_.tokens = file.integer("tokens");
  info_.text_bytes = file.integer("text_bytes");
  info_.sources = sources_from_json(file.text("sources"), path_);
  info_.content_hash = file.text("content_hash");
  if (file.integer("completed") != 1 || info_.vocab <= 0 || info_.documents <= 0 ||
      info_.tokens <= 0 || info_.documents > hdf5_bytes_ || info_.tokens > tokens_bytes_ ||
      info_.tokens * info_.token_bytes() != tokens_bytes_) {
    fail(ExitCode::kData, "{}: its attributes contradict its contents", path_);
  }
  offsets_.resize(static_cast<size_t>(info_.documents) + 1);
  file.dataset("doc_offsets", H5T_NATIVE_UINT64, offsets_.size(), offsets_.data());
  checksums_.resize(static_cast<size_t>(blocks_of(tokens_bytes_)));
  file.dataset("token_checksums", H5T_NATIVE_UINT8, checksums_.size() * sizeof(Digest),
               checksums_.data());
}

void DocumentStore::check_offsets() const {
  if (offsets_.front() != 0 || offsets_.back() != static_cast<uint64_t>(info_.tokens) ||
      !std::is_sorted(offsets_.begin(), offsets_.end())) {
    fail(ExitCode::kData, "{}: doc_offsets does not rise from 0 to {}", path_, info_.tokens);
  }
}

void DocumentStore::read_bytes(int64_t offset, void* out, int64_t bytes) const {
  read_at(fd_.get(), path_, tokens_offset_ + offset, out, bytes);
}

void DocumentStore::check_block(int64_t block, std::vector<char>& buffer,
                                uint32_t generation) const {
  const int64_t begin = block * kBlockBytes;
  const int64_t bytes = std::min(kBlockBytes, tokens_bytes_ - begin);
  buffer.resize(static_cast<size_t>(kBlockBytes));
  read_bytes(begin, buffer.data(), bytes);
  if (sha256(buffer.data(), static_cast<size_t>(bytes)) != checksums_[static_cast<size_t>(block)]) {
    fail(ExitCode::kData,
         "{}: damaged: tokens {} to {} do not match their checksum; copy the file again or run "
         "`sbtrain prepare` again",
         path_, begin / info_.token_bytes(), (begin + bytes) / info_.token_bytes() - 1);
  }
  check_tokens(block, {buffer.data(), static_cast<size_t>(bytes)});
  checked_[static_cast<size_t>(block)].store(generation, std::memory_order_relaxed);
}

// A matching checksum shows only that the bytes are those of the writer. A faulty or hostile writer
// may have stored tokens outside of the vocabulary, which would be used as rows of the embedding.
void DocumentStore::check_tokens(int64_t block, std::span<const char> bytes) const {
  const auto width = static_cast<size_t>(info_.token_bytes());
  uint32_t largest = 0;
  for (size_t i = 0; i < bytes.size(); i += width) {
    uint32_t token = 0;
    std::memcpy(&token, bytes.data() + i, width);
    largest = std::max(largest, token);
  }
  if (largest < info_.vocab) return;
  fail(ExitCode::kData,
       "{}: token {} beyond the vocabulary of {}, in tokens {} to {}; run `sbtrain prepare` again",
       path_, largest, info_.vocab, block * kBlockBytes / info_.token_bytes(),
       (block * kBlockBytes + static_cast<int64_t>(bytes.size())) / info_.token_bytes() - 1);
}

uint32_t DocumentStore::generation() const {
  const Stamp now = stamp();
  const std::lock_guard lock(stamp_mutex_);
  if (now != stamp_) {
    stamp_ = now;
    ++generation_;
  }
  return generation_;
}

void DocumentStore::read(int64_t begin, std::span<int32_t> out) const {
  constexpr int kAttempts = 10;
  for (int i = 0; i < kAttempts; ++i) {
    const uint32_t before = generation();
    read_checked(begin, out, before);
    // The file has not changed since the blocks were checked, so the bytes read are those checked.
    if (generation() == before) return;
  }
  fail(ExitCode::kData, "{}: another process keeps changing this file while it is read", path_);
}

void DocumentStore::read_checked(int64_t begin, std::span<int32_t> out, uint32_t generation) const {
  const auto count = static_cast<int64_t>(out.size());
  require(begin >= 0 && count <= info_.tokens - begin, "{}: tokens [{}, {}) of {}", path_, begin,
          begin + count, info_.tokens);
  if (count == 0) return;
  const int64_t width = info_.token_bytes();
  std::vector<char> buffer;
  for (int64_t block = begin * width / kBlockBytes;
       block <= ((begin + count) * width - 1) / kBlockBytes; ++block) {
    if (checked_[static_cast<size_t>(block)].load(std::memory_order_relaxed) != generation) {
      check_block(block, buffer, generation);
    }
  }
  if (width == 4) {
    read_bytes(begin * width, out.data(), count * width);
    return;
  }
  // The 16-bit tokens go into the upper half of `out` and are widened from the front.
  auto* narrow = reinterpret_cast<char*>(out.data()) + count * 2;
  read_bytes(begin * width, narrow, count * width);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t token = 0;
    std::memcpy(&token, narrow + 2 * i, sizeof token);
    out[static_cast<size_t>(i)] = token;
  }
}

void DocumentStore::verify() const {
  const uint32_t now = generation();
  std::exception_ptr error;
  std::atomic<bool> failed = false;
  const bool parallel = block_count() >= 64;
  if (parallel) start_parallel_threads();
#pragma omp parallel if (parallel)
  {
    std::vector<char> buffer;
#pragma omp for schedule(static, 16)
    for (int64_t block = 0; block < block_count(); ++block) {
      if (failed.load(std::memory_order_relaxed)) continue;
      try {
        check_block(block, buffer, now);
      } catch (...) {
#pragma omp critical(sbtrain_verify)
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

void DocumentStore::verify_content() const {
  verify();
  Sha256 digest;
  std::vector<char> buffer(static_cast<size_t>(kBlockBytes));
  for (int64_t at = 0; at < tokens_bytes_; at += kBlockBytes) {
    const int64_t bytes = std::min(kBlockBytes, tokens_bytes_ - at);
    read_bytes(at, buffer.data(), bytes);
    digest.update(buffer.data(), static_cast<size_t>(bytes));
  }
  const std::string hash = finish_content(digest, offsets_, info_);
  if (hash != info_.content_hash) {
    fail(ExitCode::kData, "{}: the content hash is {}, but {} is recorded", path_, hash,
         info_.content_hash);
  }
}

void check_vocab(const DocumentStore& store, int64_t of_model) {
  if (store.info().vocab <= of_model) return;
  fail(ExitCode::kConfig, "{} has a vocabulary of {}, the model of {}: set model.vocab to it",
       store.path(), store.info().vocab, of_model);
}

}  // namespace sbtrain
