#include "checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

using nlohmann::json;

// Counts the names of all objects and refuses deep nesting; makes no values.
class Scan : public json::json_sax_t {
 public:
  Scan(const std::string& what, int max_depth) : what_(what), max_depth_(max_depth) {}
  size_t names() const { return names_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t&) override { return ++names_, true; }
  bool start_object(std::size_t) override { return enter(); }
  bool end_object() override { return --depth_, true; }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return --depth_, true; }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    fail(ExitCode::kNoCheckpoint, "{} is not valid JSON: {:.300}", what_, error.what());
  }

 private:
  bool enter() {
    if (++depth_ > max_depth_) {
      fail(ExitCode::kNoCheckpoint, "{} is nested too deeply", what_);
    }
    return true;
  }
  const std::string& what_;
  int max_depth_;
  int depth_ = 0;
  size_t names_ = 0;
};

size_t names_of(const json& value) {
  size_t names = value.is_object() ? value.size() : 0;
  if (value.is_structured()) {
    for (const json& item : value) names += names_of(item);
  }
  return names;
}

// Fails with the first name that occurs twice. Slow, and so only for text that has such a name.
[[noreturn]] void fail_twice(std::string_view text, const std::string& what) {
  std::vector<std::set<std::string>> open;
  const auto find = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key &&
        !open.back().insert(value.get_ref<const std::string&>()).second) {
      fail(ExitCode::kNoCheckpoint, "{} names {:.200} twice", what, value.dump());
    }
    return true;
  };
  const json ignored = json::parse(text, find);
  fail(ExitCode::kInternal, "{}: no name occurs twice after all", what);
}

}  // namespace

nlohmann::json parse_strict(std::string_view text, const std::string& what, int max_depth) {
  Scan scan(what, max_depth);
  json::sax_parse(text, &scan);
  json value = json::parse(text);
  if (names_of(value) != scan.names()) fail_twice(text, what);
  return value;
}

}  // namespace sbtrain
