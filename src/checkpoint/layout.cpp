#include "checkpoint/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "core/error.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kStepPrefix = "step-";

}  // namespace

fs::path checkpoints_of(const fs::path& run) {
  return run / "checkpoints";
}

std::string step_name(int64_t step) {
  return fmt::format("{}{:08d}", kStepPrefix, step);
}

std::optional<int64_t> parse_step(std::string_view name, std::string_view suffix) {
  if (!name.starts_with(kStepPrefix) || !name.ends_with(suffix)) return std::nullopt;
  name.remove_prefix(kStepPrefix.size());
  name.remove_suffix(suffix.size());
  const bool digits =
      !name.empty() && name.size() <= 18 &&
      std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) return std::nullopt;
  return std::stoll(std::string(name));
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    fail(ExitCode::kNoCheckpoint, "{}: cannot list: {}", folder.string(), error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string key_of(std::string_view kind, std::string_view name) {
  return fmt::format("{}/{}", kind, name);
}

std::vector<int64_t> stored_shape(const std::vector<int64_t>& shape, int64_t begin, int64_t end) {
  if (begin == 0 && end == checked_numel(shape)) return shape;
  return {end - begin};
}

}  // namespace sbtrain
