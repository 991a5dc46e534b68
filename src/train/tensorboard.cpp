#include "train/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <filesystem>

#include "core/files.h"
#include "core/host_name.h"

namespace sbtrain {

namespace fs = std::filesystem;

namespace {

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

// TFRecord masks its checksums, because a CRC of data that contains CRCs is weak.
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

template <typename T>
void put_fixed(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

// A protobuf field is a key, made of number and wire type, and then the value.
enum Wire : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
void put_key(std::string& out, uint64_t field, Wire wire) {
  put_varint(out, field << 3 | wire);
}

void put_int(std::string& out, uint64_t field, int64_t value) {
  put_key(out, field, kVarint);
  put_varint(out, static_cast<uint64_t>(value));
}

void put_double(std::string& out, uint64_t field, double value) {
  put_key(out, field, kFixed64);
  put_fixed(out, std::bit_cast<uint64_t>(value));
}

void put_float(std::string& out, uint64_t field, float value) {
  put_key(out, field, kFixed32);
  put_fixed(out, std::bit_cast<uint32_t>(value));
}

void put_bytes(std::string& out, uint64_t field, std::string_view value) {
  put_key(out, field, kBytes);
  put_varint(out, value.size());
  out.append(value);
}

std::string event_at(double wall_time, int64_t step) {
  std::string event;
  put_double(event, 1, wall_time);
  if (step != 0) put_int(event, 2, step);
  return event;
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard reads the files of a folder in the order of their names, so the time comes first.
std::string file_name(double time, int attempt) {
  return fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<int64_t>(time), host_name(),
                     ::getpid(), attempt);
}

std::string new_path(const std::string& folder, double time) {
  make_folders(folder);
  for (int attempt = 0;; ++attempt) {
    fs::path path = fs::path(folder) / file_name(time, attempt);
    if (!fs::exists(path)) return path.string();
  }
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char c : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xFFU];
  return ~crc;
}

TensorboardWriter::TensorboardWriter(const std::string& folder,
                                     std::optional<int64_t> resumed_step) {
  const double now = unix_time();
  file_.emplace(new_path(folder, now), AppendFile::Mode::kCreate);
  std::string version = event_at(now, 0);
  put_bytes(version, 3, "brain.Event:2");
  append(version);
  // SessionLog with status START: readers drop events of earlier files from this step on. A run
  // that begins anew has a validation of step 0.
  std::string session;
  put_int(session, 1, 1);
  std::string start = event_at(now, resumed_step ? *resumed_step + 1 : 0);
  put_bytes(start, 7, session);
  append(start);
}

void TensorboardWriter::write_text(std::string_view tag, std::string_view text, int64_t step) {
  // A summary value: 1 tag, 8 tensor (1 dtype, DT_STRING is 7; 8 string_val), 9 metadata (1
  // plugin_data with 1 plugin_name). The tensor has no shape, so it is a scalar.
  std::string tensor;
  put_int(tensor, 1, 7);
  put_bytes(tensor, 8, text);
  std::string plugin;
  put_bytes(plugin, 1, "text");
  std::string metadata;
  put_bytes(metadata, 1, plugin);
  std::string value;
  put_bytes(value, 1, tag);
  put_bytes(value, 8, tensor);
  put_bytes(value, 9, metadata);
  std::string summary;
  put_bytes(summary, 1, value);
  std::string event = event_at(unix_time(), step);
  put_bytes(event, 5, summary);
  append(event);
}

void TensorboardWriter::write(const MetricRecord& record) {
  std::string summary;
  for (const Metric& metric : record.values) {
    std::string value;
    put_bytes(value, 1, metric.name);
    put_float(value, 2, static_cast<float>(metric.value));
    put_bytes(summary, 1, value);
  }
  std::string event = event_at(record.wall_time, record.step);
  put_bytes(event, 5, summary);
  append(event);
}

void TensorboardWriter::append(std::string_view event) {
  std::string record;
  put_fixed(record, static_cast<uint64_t>(event.size()));
  put_fixed(record, masked_crc(record));
  record.append(event);
  put_fixed(record, masked_crc(event));
  file_->append(record);
}

}  // namespace sbtrain
