// Tokenised documents in one HDF5 file, each token checked before it is used.
//
// What the file holds (any HDF5 reader can open it):
//   /tokens           uint16, uint32 when the vocabulary exceeds 65536; [tokens], contiguous
//   /doc_offsets      uint64 [documents + 1]; document n is tokens [doc_offsets[n],
//                     doc_offsets[n+1])
//   /token_checksums  uint8 [blocks, 32]: SHA-256 of each kBlockBytes bytes of /tokens
//   attributes of /   format_version, vocab, tokenizer_hash, bos, eos, starts_with_bos,
//                     ends_with_eos, documents, tokens, text_bytes, sources (JSON),
//                     content_hash, completed
// A seal of 96 bytes follows the HDF5 data: where the tokens lie, the file's size, and the SHA-256
// of every byte outside of /tokens and of the seal itself. It is written last. So a file that is
// unfinished, truncated or changed in any bit is refused: all but the tokens when it is opened,
// before HDF5 sees it, the tokens by verify() or when a block is first read.
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
  bool starts_with_bos = false;  // each document does
  bool ends_with_eos = true;
  int64_t text_bytes = 0;  // of the text that was tokenised
  std::vector<StoreSource> sources;
  // Filled in by the store:
  int64_t documents = 0;
  int64_t tokens = 0;
  std::string content_hash;  // SHA-256 of tokens, offsets and vocabulary, hexadecimal

  int64_t token_bytes() const { return vocab > 65536 ? 4 : 2; }
};

// Writes a store by way of PATH.tmp (AtomicFile); the file gets its name in finish(), and is
// removed if that never happens. Throws ExitCode::kStorage. One thread at a time.
class DocumentWriter {
 public:
  // Of `info`, vocab, tokenizer_hash, bos, eos, starts_with_bos and ends_with_eos count.
  DocumentWriter(std::string path, StoreInfo info);
  DocumentWriter(const DocumentWriter&) = delete;
  DocumentWriter& operator=(const DocumentWriter&) = delete;

  // A document, or a part of one unless it is the `last`; bos and eos are in it already. Throws
  // ExitCode::kInternal for an id outside of the vocabulary.
  void append(std::span<const int32_t> tokens, bool last = true);

  // Returns what was written. Throws ExitCode::kData where there is no token.
  StoreInfo finish(std::vector<StoreSource> sources, int64_t text_bytes);

 private:
  void flush_block();
  void write_hdf5();
  void copy_tokens(int64_t offset);
  void seal(int64_t tokens_offset);

  std::string path_;
  AtomicFile file_;
  FileDescriptor spool_;  // raw tokens, until their number is known; a file without a name
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

  // Tokens [begin, begin + out.size()) of the whole store. Blocks not seen before are checked
  // first, and all of them anew once the file has been touched: a store that is changed in place
  // while it is open is refused as if it had been damaged before. Throws ExitCode::kData for a
  // block that does not match its checksum or holds a token beyond the vocabulary.
  void read(int64_t begin, std::span<int32_t> out) const;

  // Checks every token block, on all cores (about 1.5 GB/s each where the processor has SHA
  // instructions). Throws ExitCode::kData naming the first bad one.
  void verify() const;

  // verify(), and the content hash as well, which only a faulty writer could get wrong.
  void verify_content() const;

 private:
  // What the file system says of the file; it changes whenever the file is written to.
  struct Stamp {
    int64_t bytes = 0;
    int64_t modified = 0;  // ns
    int64_t changed = 0;   // ns
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  // Counts the states that the file has been seen in, from 1.
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
  // The generation in which each block was found good; 0: not yet.
  mutable std::unique_ptr<std::atomic<uint32_t>[]> checked_;
  mutable std::mutex stamp_mutex_;  // guards the two below
  mutable Stamp stamp_;
  mutable uint32_t generation_ = 1;
};

}  // namespace sbtrain
