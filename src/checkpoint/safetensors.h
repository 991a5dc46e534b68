// The safetensors file format (https://github.com/huggingface/safetensors): 8 bytes of
// little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
//
// Hugging Face's library reads the files written here, and files that it writes are read here. All
// of a file's structure is checked before any of it is used: header length, JSON depth, duplicate
// names, dtypes, shapes, offsets without holes or overlaps, and the file's size. Errors are
// ExitCode::kNoCheckpoint and name the file and the tensor.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/storage.h"

namespace sbtrain {

// Element types of the format.
enum class FileDType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};
size_t file_dtype_size(FileDType dtype);       // bytes per element
const char* file_dtype_name(FileDType dtype);  // "F32", as in the header

struct SafetensorsEntry {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;  // empty: one element
  uint64_t begin = 0;          // bytes [begin, end) of the data area; set by writer and reader
  uint64_t end = 0;
  uint64_t bytes() const { return end - begin; }
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// Writes a file directly from the caller's memory.
class SafetensorsWriter {
 public:
  // Creates the file, takes its disk space and writes its header. Tensors are laid out by element
  // size, largest first (so that every tensor is aligned), otherwise in the order given.
  SafetensorsWriter(const Storage& storage, const std::filesystem::path& path,
                    std::vector<SafetensorsEntry> tensors, const SafetensorsMetadata& metadata);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in file order

  // Writes bytes [offset, offset + bytes) of tensor `name`, each byte once, in any order and from
  // any number of threads.
  void write(std::string_view name, uint64_t offset, const void* data, uint64_t bytes);

  struct Result {
    uint64_t bytes = 0;         // file size
    std::string header_sha256;  // of everything before the tensors' data
  };
  // Flushes the file to disk and closes it. Throws when bytes are missing.
  Result finish();

 private:
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> by_name_;
  OutputFile file_;
  uint64_t data_offset_ = 0;
  uint64_t data_bytes_ = 0;
  std::string header_sha256_;
  std::atomic<uint64_t> written_ = 0;
};

// A checked header, and access to the data. The file stays open, so that a run may remove it, as an
// old checkpoint, while it is read.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in file order
  bool has(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }
  const SafetensorsEntry& at(std::string_view name) const;
  uint64_t data_offset() const { return data_offset_; }  // of the data area in the file

  // Reads `bytes` bytes of a tensor from byte `offset` of its data.
  void read(const SafetensorsEntry& entry, uint64_t offset, void* out, uint64_t bytes) const;

 private:
  void read_metadata(const nlohmann::json& value);
  void check_layout(uint64_t data_bytes);

  std::filesystem::path path_;
  std::shared_ptr<const InputFile> input_;
  SafetensorsMetadata metadata_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> by_name_;
  uint64_t data_offset_ = 0;
};

}  // namespace sbtrain
