#include "train/start_order.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "core/sha256.h"

namespace sbtrain {
namespace fs = std::filesystem;

StartOrder::StartOrder(fs::path run, std::string resume, const std::string& config_yaml)
    : run_(std::move(run)), order_(std::move(resume)), config_(sha256_hex(config_yaml)) {}

// The saves that there were before the order was first obeyed, if this command has begun already.
std::optional<int64_t> StartOrder::noted() const {
  std::error_code unreadable;
  if (!fs::exists(file(), unreadable)) return std::nullopt;
  try {
    const nlohmann::json note = nlohmann::json::parse(read_input(file(), ExitCode::kStorage));
    if (note.at("config_sha256") != config_) return std::nullopt;
    return note.at("saves_before").get<int64_t>();
  } catch (const nlohmann::json::exception& error) {
    log_warning("{}: {}; checkpoint.resume={} is obeyed", file().string(), error.what(), order_);
    return std::nullopt;
  }
}

std::string StartOrder::resume() {
  sequence_ = last_sequence(run_);
  if (order_ == "auto") return order_;
  if (const std::optional<int64_t> before = noted()) {
    if (const std::optional<CheckpointReader> begun = open_newest_after(run_, *before)) {
      log_info(
          "this command has begun already, with checkpoint.resume={}: it continues from its newest "
          "checkpoint. Remove {} to obey checkpoint.resume once more",
          order_, file().string());
      obeyed_ = false;
      return begun->folder().string();
    }
  }
  return order_;
}

void StartOrder::note() const {
  if (order_ == "auto") return forget();
  if (!obeyed_) return;
  const nlohmann::json note = {
      {"resume", order_}, {"config_sha256", config_}, {"saves_before", sequence_}};
  replace_file(file(), note.dump(2) + "\n", {}, MissingFolders::kError);
}

void StartOrder::forget() const {
  std::error_code error;
  fs::remove(file(), error);
  if (error) log_warning("cannot remove {}: {}", file().string(), error.message());
}

}  // namespace sbtrain
