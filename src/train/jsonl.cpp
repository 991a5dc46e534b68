#include "train/jsonl.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"

namespace sbtrain {

namespace fs = std::filesystem;

namespace {

// Whether a line is a record of a step up to `last_step`.
bool keep(const std::string& line, int64_t last_step) {
  const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) return false;
  const auto step = record.find("step");
  return step != record.end() && step->is_number_integer() && step->get<int64_t>() <= last_step;
}

struct Kept {
  std::string text;
  int64_t dropped = 0;
};

Kept read_up_to(const std::string& path, int64_t last_step) {
  Kept kept;
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(ExitCode::kStorage, "{}: cannot read the metrics of the run to resume", path);
  for (std::string line; std::getline(in, line);) {
    // A last line without its newline is incomplete, even if it can be parsed.
    if (!in.eof() && keep(line, last_step)) {
      kept.text += line + '\n';
    } else {
      ++kept.dropped;
    }
  }
  return kept;
}

void prepare(const std::string& path, std::optional<int64_t> resumed_step) {
  if (!fs::exists(path) || fs::file_size(path) == 0) return;
  if (!resumed_step) {
    log_warning("{} belongs to an earlier run; it is kept as {}", path, set_aside(path).string());
    return;
  }
  const Kept kept = read_up_to(path, *resumed_step);
  if (kept.dropped > 0) replace_file(path, kept.text, {}, MissingFolders::kError);
}

}  // namespace

JsonlWriter::JsonlWriter(const std::string& path, std::optional<int64_t> resumed_step,
                         int64_t tokens_per_step)
    : tokens_per_step_(tokens_per_step) {
  try {
    prepare(path, resumed_step);
  } catch (const fs::filesystem_error& error) {
    fail(ExitCode::kStorage, "{}: cannot prepare the metrics file: {}", path, error.what());
  }
  file_.emplace(path, AppendFile::Mode::kAppend);
}

void JsonlWriter::write(const MetricRecord& record) {
  nlohmann::ordered_json line;
  line["step"] = record.step;
  line["tokens"] = record.step * tokens_per_step_;
  line["time"] = record.wall_time;
  for (const Metric& metric : record.values) line[metric.name] = metric.value;
  file_->append(line.dump() + '\n');
}

}  // namespace sbtrain
