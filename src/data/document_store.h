// Tokenised documents in one HDF5 file, each token checked before it is used.
//
// The file holds (any HDF5 reader can open it):
//   /tokens           uint16, uint32 when the vocabulary exceeds 65536; [tokens], contiguous
//   /doc_offsets      uint64 [documents + 1]; document n is tokens [doc_offsets[n],
//                     doc_offsets[n+1])
//   /token_checksums  uint8 [blocks, 32]: SHA-256 of each kBlockBytes bytes of /tokens
//   attributes of /   format_version, vocab, tokenizer_hash, bos, eos, starts_with_bos,
//                     ends_with_eos, documents, tokens, text_bytes, sources (JSON),
//                     content_hash, completed
// A seal of 96 bytes follows the HDF5 data. It records where the tokens lie, the file's size, and
// the SHA-256 of every byte outside of /tokens and of the seal itself, and it is written last. So a
// file that is unfinished, truncated or changed in any bit is refused. Everything but the tokens is
// checked on opening, before HDF5 reads it; the tokens by verify() or when a block is first read.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/file_descriptor.h"
#include "core/files.h"
#include "core/sha256.h"

namespace sbtrain {

inline constexpr int64_t kStoreVersion = 1;
inline constexpr int64_t kBlockBytes = 128 * 1024;  // what one token checksum covers

// Where documents came from.
struct StoreSource {
  std::string name;
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t text_bytes = 0;
  bool operator==(const StoreSource&) const = default;
};

struct StoreInfo {
  int64_t vocab = 0;
  std::string tokenizer_hash;  // SHA-256 of the tokenizer's model file, hexadecimal
  int32_t bos = -1;            // ids of the tokenizer's special tokens; -1: none
  int32_t eos = -1;
  bool starts_with_bos = false;  // every document starts with bos
  bool ends_with_eos = true;
  int64_t text_bytes = 0;  // length of the text that was tokenised
  std::vector<StoreSource> sources;
  // Filled in by the store:
  int64_t documents = 0;
  int64_t tokens = 0;
  std::string content_hash;  // SHA-256 of tokens, offsets and vocabulary, hexadecimal

  int64_t token_bytes() const { return vocab > 65536 ? 4 : 2; }
};

// Writes a store as PATH.tmp (AtomicFile). commit() or finish() gives the file its name;
// without them the temporary file is removed. Throws ExitCode::kStorage. For use by one thread at a
// time.
class DocumentWriter {
 public:
  // Uses vocab, tokenizer_hash, bos, eos, starts_with_bos and ends_with_eos of `info`.
  DocumentWriter(std::string path, StoreInfo info);
  DocumentWriter(const DocumentWriter&) = delete;
  DocumentWriter& operator=(const DocumentWriter&) = delete;

  // Appends to the current document, and ends it if this is its `last` part. `tokens` include bos
  // and eos. Throws ExitCode::kInternal for an id outside of the vocabulary.
  void append(std::span<const int32_t> tokens, bool last = true);

  // Completes the file, still under its temporary name, down to the disk, and returns what it
  // holds. Throws ExitCode::kData if there are no tokens. commit() then gives it its name.
  StoreInfo complete(std::vector<StoreSource> sources, int64_t text_bytes);
  void commit();
  StoreInfo finish(std::vector<StoreSource> sources, int64_t text_bytes);  // both

 private:
  void flush_block();
  void write_hdf5();
  void copy_tokens(int64_t offset);
  void seal(int64_t tokens_offset);

  std::string path_;
  AtomicFile file_;
  FileDescriptor spool_;  // unnamed file of raw tokens, kept until their number is known
  StoreInfo info_;
  std::vector<uint64_t> offsets_{0};
  uint64_t tokens_ = 0;
  std::vector<char> block_;
  std::vector<Digest> checksums_;
  Sha256 content_;
};

// Reads a store. All const members may be called from several threads at once.
class DocumentStore {
 public:
  // Checks and reads everything but the tokens. Throws ExitCode::kData with the file's name for a
  // file that is missing, unfinished, truncated, damaged or of another format.
  explicit DocumentStore(std::string path);
  ~DocumentStore();
  DocumentStore(const DocumentStore&) = delete;
  DocumentStore& operator=(const DocumentStore&) = delete;

  const std::string& path() const { return path_; }
  const StoreInfo& info() const { return info_; }
  int64_t documents() const { return info_.documents; }
  int64_t tokens() const { return info_.tokens; }
  std::span<const uint64_t> offsets() const { return offsets_; }
  int64_t length(int64_t document) const {
    const auto n = static_cast<size_t>(document);
    return static_cast<int64_t>(offsets_[n + 1] - offsets_[n]);
  }

  // Reads tokens [begin, begin + out.size()) of the whole store. A block is checked when it is
  // first read, and again after the file has been modified: a store that changes while it is open
  // is refused like one that was damaged before. Throws ExitCode::kData for a block that does not
  // match its checksum or holds a token outside of the vocabulary.
  void read(int64_t begin, std::span<int32_t> out) const;

  // Checks every token block, on all cores (about 1.5 GB/s per core if the processor has SHA
  // instructions). Throws ExitCode::kData naming the first bad one.
  void verify() const;

  // Calls verify() and also checks the content hash, which only a faulty writer could get wrong.
  void verify_content() const;

 private:
  // The file system's size and times of the file; they change whenever the file is written.
  struct Stamp {
    int64_t bytes = 0;
    int64_t modified = 0;  // ns
    int64_t changed = 0;   // ns
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  // The number of the file's present state: 1 at first, and one more after each modification.
  uint32_t generation() const;
  void read_checked(int64_t begin, std::span<int32_t> out, uint32_t generation) const;
  void check_tokens(int64_t block, std::span<const char> bytes) const;
  void check_seal();
  void read_hdf5();
  void check_offsets() const;
  void check_block(int64_t block, std::vector<char>& buffer, uint32_t generation) const;
  void read_bytes(int64_t offset, void* out, int64_t bytes) const;
  int64_t block_count() const { return static_cast<int64_t>(checksums_.size()); }

  std::string path_;
  FileDescriptor fd_;
  StoreInfo info_;
  int64_t hdf5_bytes_ = 0;
  int64_t tokens_offset_ = 0;  // in the file
  int64_t tokens_bytes_ = 0;
  std::vector<uint64_t> offsets_;
  std::vector<Digest> checksums_;
  // The generation in which each block was last found good; 0: not checked yet.
  mutable std::unique_ptr<std::atomic<uint32_t>[]> checked_;
  mutable std::mutex stamp_mutex_;  // guards the two below
  mutable Stamp stamp_;
  mutable uint32_t generation_ = 1;
};

// Throws ExitCode::kConfig if the store may have tokens that a model of so many does not know.
void check_vocab(const DocumentStore& store, int64_t of_model);

}  // namespace sbtrain
