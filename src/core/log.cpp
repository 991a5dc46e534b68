#include "core/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sbtrain {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

LogLevel from_spdlog(spdlog::level::level_enum level) {
  if (level >= spdlog::level::err) return LogLevel::kError;
  if (level == spdlog::level::warn) return LogLevel::kWarning;
  return level == spdlog::level::info ? LogLevel::kInfo : LogLevel::kDebug;
}

// Gives a sink of ours the lines of spdlog's loggers.
class Adapter : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit Adapter(std::shared_ptr<LogSink> sink) : sink_(std::move(sink)) {}
  LogSink& sink() { return *sink_; }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t buffer;
    formatter_->format(message, buffer);
    sink_->write({.level = from_spdlog(message.level),
                  .text = {buffer.data(), buffer.size()},
                  .colour_begin = message.color_range_start,
                  .colour_end = message.color_range_end});
  }
  void flush_() override {}

 private:
  std::shared_ptr<LogSink> sink_;
};

std::vector<std::shared_ptr<Adapter>>& added_sinks() {
  static std::vector<std::shared_ptr<Adapter>> sinks;
  return sinks;
}

}  // namespace

void set_log_sink(std::shared_ptr<LogSink> sink) {
  static const std::shared_ptr<spdlog::logger> kFirst = spdlog::default_logger();
  spdlog::set_default_logger(
      sink ? std::make_shared<spdlog::logger>("", std::make_shared<Adapter>(std::move(sink)))
           : kFirst);
}

void add_log_sink(std::shared_ptr<LogSink> sink) {
  added_sinks().push_back(std::make_shared<Adapter>(std::move(sink)));
  spdlog::default_logger()->sinks().push_back(added_sinks().back());
}

void log_to_added_sinks(LogLevel level, std::string_view text) {
  for (const auto& sink : added_sinks()) {
    sink->log(spdlog::details::log_msg("", to_spdlog(level), text));
  }
}

void limit_log_sinks(LogLevel level) {
  for (const auto& sink : spdlog::default_logger()->sinks()) sink->set_level(to_spdlog(level));
}

void for_each_log_sink(const std::function<void(LogSink&)>& visit) {
  const auto logger = spdlog::default_logger();
  for (const auto& sink : logger->sinks()) {
    if (auto* adapter = dynamic_cast<Adapter*>(sink.get())) visit(adapter->sink());
  }
}

LogLevel log_level() {
  return from_spdlog(spdlog::get_level());
}

void set_log_level(LogLevel level) {
  spdlog::set_level(to_spdlog(level));
}

void log_line(LogLevel level, std::string_view text) {
  spdlog::default_logger_raw()->log(to_spdlog(level), text);
}

void log_line_once(LogLevel level, std::string_view text) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> said;
  {
    const std::lock_guard lock(mutex);
    if (!said.emplace(text).second) return;
  }
  log_line(level, text);
}

}  // namespace sbtrain
