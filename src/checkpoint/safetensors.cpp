#include "checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "checkpoint/strict_json.h"
#include "core/error.h"

namespace sbtrain {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr uint64_t kLengthBytes = 8;
constexpr int kHeaderDepth = 3;  // file object, tensor object, array
constexpr const char* kMetadata = "__metadata__";

struct DTypeInfo {
  const char* name;
  size_t size;
};
constexpr std::array<DTypeInfo, 15> kDTypes = {{{"BOOL", 1},
                                                {"U8", 1},
                                                {"I8", 1},
                                                {"F8_E5M2", 1},
                                                {"F8_E4M3", 1},
                                                {"I16", 2},
                                                {"U16", 2},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"I32", 4},
                                                {"U32", 4},
                                                {"F32", 4},
                                                {"I64", 8},
                                                {"U64", 8},
                                                {"F64", 8}}};

const DTypeInfo& info(FileDType dtype) {
  return kDTypes.at(static_cast<size_t>(dtype));
}

std::optional<FileDType> parse_dtype(std::string_view name) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (name == kDTypes[i].name) return static_cast<FileDType>(i);
  }
  return std::nullopt;
}

// The bytes of a tensor, or nothing if they do not fit in 64 bits. Zero is checked last, so that
// [0, huge, huge] is refused as well: other code could not count its elements.
std::optional<uint64_t> checked_bytes(FileDType dtype, const std::vector<int64_t>& shape) {
  uint64_t bytes = file_dtype_size(dtype);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
               bytes > static_cast<uint64_t>(INT64_MAX)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

// Assigns offsets; tensors with the largest elements come first.
std::vector<SafetensorsEntry> laid_out(std::vector<SafetensorsEntry> entries) {
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return file_dtype_size(a.dtype) > file_dtype_size(b.dtype);
  });
  uint64_t offset = 0;
  std::set<std::string_view> names;
  for (SafetensorsEntry& entry : entries) {
    const auto bytes = checked_bytes(entry.dtype, entry.shape);
    require(bytes.has_value(), "tensor {}: impossible shape [{}]", entry.name,
            fmt::join(entry.shape, ", "));
    require(entry.name != kMetadata && names.insert(entry.name).second,
            "tensor name {} is reserved or used twice", entry.name);
    entry.begin = offset;
    entry.end = offset += *bytes;
  }
  return entries;
}

std::string header_text(const std::vector<SafetensorsEntry>& entries,
                        const SafetensorsMetadata& metadata) {
  std::string text = fmt::format("{{\"{}\":{}", kMetadata, json(metadata).dump());
  for (const SafetensorsEntry& entry : entries) {
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        json(entry.name).dump(), file_dtype_name(entry.dtype),
                        fmt::join(entry.shape, ","), entry.begin, entry.end);
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts at a multiple of 8
  return text;
}

std::vector<uint64_t> unsigned_list(const json& value) {
  std::vector<uint64_t> list;
  for (const json& item : value) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      throw json::other_error::create(501, "expected whole numbers from 0 to 2^63 - 1", nullptr);
    }
    list.push_back(item.get<uint64_t>());
  }
  return list;
}

SafetensorsEntry parse_entry(const std::string& file, const std::string& name, const json& value) {
  try {
    const auto dtype = parse_dtype(value.at("dtype").get_ref<const std::string&>());
    if (!dtype) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {}: unknown dtype {}", file, name,
           value.at("dtype").dump());
    }
    if (!value.at("shape").is_array() || !value.at("data_offsets").is_array()) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {}: shape and data_offsets must be lists", file,
           name);
    }
    const std::vector<uint64_t> shape = unsigned_list(value.at("shape"));
    const std::vector<uint64_t> offsets = unsigned_list(value.at("data_offsets"));
    if (value.size() != 3 || offsets.size() != 2) {
      fail(ExitCode::kNoCheckpoint,
           "{}: tensor {}: expected dtype, shape and two data_offsets, nothing else", file, name);
    }
    SafetensorsEntry entry{name, *dtype, {shape.begin(), shape.end()}, offsets[0], offsets[1]};
    const auto bytes = checked_bytes(entry.dtype, entry.shape);
    if (!bytes || entry.end < entry.begin || entry.bytes() != *bytes) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {}: {}[{}] does not fill data_offsets [{}, {}]",
           file, name, file_dtype_name(entry.dtype), fmt::join(entry.shape, ", "), entry.begin,
           entry.end);
    }
    return entry;
  } catch (const json::exception& e) {
    fail(ExitCode::kNoCheckpoint, "{}: tensor {}: bad header entry: {}", file, name, e.what());
  }
}

}  // namespace

size_t file_dtype_size(FileDType dtype) {
  return info(dtype).size;
}
const char* file_dtype_name(FileDType dtype) {
  return info(dtype).name;
}

SafetensorsWriter::SafetensorsWriter(const Storage& storage, const std::filesystem::path& path,
                                     std::vector<SafetensorsEntry> tensors,
                                     const SafetensorsMetadata& metadata)
    : entries_(laid_out(std::move(tensors))), file_(storage.create(path)) {
  const std::string text = header_text(entries_, metadata);
  require(text.size() <= kMaxHeaderBytes, "{}: the header of {} bytes is too long", path.string(),
          text.size());
  const uint64_t length = text.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  header += text;
  data_offset_ = header.size();
  data_bytes_ = entries_.empty() ? 0 : entries_.back().end;
  for (size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
  file_.reserve(data_offset_ + data_bytes_);
  file_.write_at(0, header.data(), header.size());
  header_sha256_ = sha256_hex(header);
}

void SafetensorsWriter::write(std::string_view name, uint64_t offset, const void* data,
                              uint64_t bytes) {
  const auto found = by_name_.find(name);
  const uint64_t size = found == by_name_.end() ? 0 : entries_[found->second].bytes();
  require(found != by_name_.end() && offset <= size && bytes <= size - offset,
          "{}: bytes [{}, +{}) of tensor {} are outside of it", file_.path().string(), offset,
          bytes, name);
  file_.write_at(data_offset_ + entries_[found->second].begin + offset, data, bytes);
  written_ += bytes;
}

SafetensorsWriter::Result SafetensorsWriter::finish() {
  require(written_ == data_bytes_, "{}: {} of {} bytes were written", file_.path().string(),
          written_.load(), data_bytes_);
  file_.finish();
  return {data_offset_ + data_bytes_, header_sha256_};
}

SafetensorsReader::SafetensorsReader(std::filesystem::path path)
    : path_(std::move(path)), input_(std::make_shared<const InputFile>(path_)) {
  const std::string file = path_.string();
  const InputFile& input = *input_;
  if (input.size() < kLengthBytes) {
    fail(ExitCode::kNoCheckpoint, "{}: {} bytes are too few for a safetensors file", file,
         input.size());
  }
  uint64_t length = 0;
  input.read(0, &length, kLengthBytes);
  if (length > kMaxHeaderBytes || length > input.size() - kLengthBytes) {
    fail(ExitCode::kNoCheckpoint, "{}: impossible header length {} in a file of {} bytes", file,
         length, input.size());
  }
  std::string text(length, '\0');
  input.read(kLengthBytes, text.data(), length);
  data_offset_ = kLengthBytes + length;

  parse_members(text, file + ": the header", kHeaderDepth,
                [&](const std::string& name, const json& value) {
                  if (name == kMetadata) {
                    read_metadata(value);
                  } else {
                    entries_.push_back(parse_entry(file, name, value));
                  }
                });
  check_layout(input.size() - data_offset_);
}

void SafetensorsReader::read_metadata(const nlohmann::json& value) {
  if (!value.is_object()) fail(ExitCode::kNoCheckpoint, "{}: bad {}", path_.string(), kMetadata);
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      fail(ExitCode::kNoCheckpoint, "{}: {} holds something other than texts", path_.string(),
           kMetadata);
    }
    metadata_[key] = text.get<std::string>();
  }
}

// Checks that the tensors fill the data area exactly, without gaps or overlaps.
void SafetensorsReader::check_layout(uint64_t data_bytes) {
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t offset = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const SafetensorsEntry& entry = entries_[i];
    if (entry.begin != offset) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {} starts at byte {} of the data, {} {}",
           path_.string(), entry.name, entry.begin,
           entry.begin < offset ? "inside the tensor before it, which ends at byte"
                                : "leaving a hole after byte",
           offset);
    }
    if (entry.end > data_bytes) {
      fail(ExitCode::kNoCheckpoint, "{}: tensor {} ends at byte {}, but the data has {} bytes",
           path_.string(), entry.name, entry.end, data_bytes);
    }
    offset = entry.end;
    by_name_.emplace(entry.name, i);
  }
  if (offset != data_bytes) {
    fail(ExitCode::kNoCheckpoint, "{}: the tensors have {} bytes, but the data {}", path_.string(),
         offset, data_bytes);
  }
}

const SafetensorsEntry& SafetensorsReader::at(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    fail(ExitCode::kNoCheckpoint, "{}: no tensor {}", path_.string(), name);
  }
  return entries_[found->second];
}

void SafetensorsReader::read(const SafetensorsEntry& entry, uint64_t offset, void* out,
                             uint64_t bytes) const {
  require(offset <= entry.bytes() && bytes <= entry.bytes() - offset,
          "{}: tensor {}: bytes [{}, +{}) are out of range", path_.string(), entry.name, offset,
          bytes);
  if (bytes > 0) input_->read(data_offset_ + entry.begin + offset, out, bytes);
}

}  // namespace sbtrain
