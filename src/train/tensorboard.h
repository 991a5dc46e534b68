// TensorBoard event files, written without TensorFlow or protobuf.
//
// A file is a sequence of TFRecords: u64 length, masked CRC32C of those 8 bytes, the payload,
// masked CRC32C of the payload, all little endian (tensorflow/core/lib/io/record_writer.h). A
// payload is a protobuf Event (tensorboard/compat/proto/event.proto): 1 wall_time double, 2 step
// int64, 3 file_version string, 5 summary, 7 session_log. The first event carries file_version
// "brain.Event:2".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "train/metrics.h"
#include "train/metrics_file.h"

namespace sbtrain {

// CRC-32C (Castagnoli), as in RFC 3720.
uint32_t crc32c(std::string_view bytes);

class TensorboardWriter {
 public:
  // Starts a new event file in `folder`, which is created if missing. The file tells TensorBoard to
  // drop what earlier files hold after the resumed step, or all of it where the run begins anew.
  // Throws ExitCode::kStorage.
  TensorboardWriter(const std::string& folder, std::optional<int64_t> resumed_step);

  // A text in Markdown, which TensorBoard shows under "Text". Throws ExitCode::kStorage.
  void write_text(std::string_view tag, std::string_view text, int64_t step);

  // One scalar per value, as fp32. Throws ExitCode::kStorage.
  void write(const MetricRecord& record);
  void sync() const { file_->sync(); }

  const std::string& path() const { return file_->path(); }

 private:
  void append(std::string_view event);
  std::optional<AppendFile> file_;
};

}  // namespace sbtrain
