// metrics.jsonl has one JSON object per line, e.g.
//   {"step":10,"tokens":10240,"time":1700000000.25,"train/loss":8.31,"train/lr":0.0001}
// step and tokens count from the start of the run, time is in Unix seconds. Values that are not
// finite are null, since JSON has no NaN.
#pragma once

#include <optional>
#include <string>

#include "train/metrics.h"
#include "train/metrics_file.h"

namespace sbtrain {

class JsonlWriter {
 public:
  // A resumed run continues the same file. Records after `resumed_step` and an incomplete last line
  // are removed first, so that the file reads as one run; the file is replaced atomically. Without
  // a resumed step an earlier file is kept as <path>.old, or <path>.old.2 and so on.
  // Throws ExitCode::kStorage.
  JsonlWriter(const std::string& path, std::optional<int64_t> resumed_step,
              int64_t tokens_per_step);

  void write(const MetricRecord& record);  // throws ExitCode::kStorage
  void sync() const { file_->sync(); }

 private:
  int64_t tokens_per_step_;
  std::optional<AppendFile> file_;
};

}  // namespace sbtrain
