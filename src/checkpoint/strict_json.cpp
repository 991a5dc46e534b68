#include "checkpoint/strict_json.h"

#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

using nlohmann::json;

// Receives the parts of a text and puts them together.
class Builder : public json::json_sax_t {
 public:
  Builder(const std::string& what, int max_depth, const VisitMember* visit)
      : what_(what), max_depth_(max_depth), visit_(visit) {}
  json take() { return std::move(root_); }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(number_integer_t value) override { return scalar(value); }
  bool number_unsigned(number_unsigned_t value) override { return scalar(value); }
  bool number_float(number_float_t value, const string_t&) override { return scalar(value); }
  bool string(string_t& value) override { return scalar(std::move(value)); }
  bool binary(binary_t&) override { return true; }  // not in text
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (members_apart()) {
      if (!names_.insert(name).second) fail_twice(name);
      name_ = std::move(name);
      value_ = nullptr;
      slot_ = &value_;
      return true;
    }
    const auto [at, fresh] = open_.back()->get_ref<json::object_t&>().emplace(name, nullptr);
    if (!fresh) fail_twice(name);
    slot_ = &at->second;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    fail(ExitCode::kNoCheckpoint, "{} is not valid JSON: {:.300}", what_, error.what());
  }

 private:
  // Whether the next name is that of a member to visit.
  bool members_apart() const {
    return visit_ != nullptr && open_.size() == 1 && open_.front()->is_object();
  }

  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }

  bool scalar(json value) {
    place(std::move(value));
    return complete();
  }

  bool open(json value) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      fail(ExitCode::kNoCheckpoint, "{} is nested too deeply", what_);
    }
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return complete();
  }

  bool complete() {
    if (members_apart()) (*visit_)(name_, value_);
    if (open_.empty() && visit_ != nullptr && !root_.is_object()) {
      fail(ExitCode::kNoCheckpoint, "{} is no object", what_);
    }
    return true;
  }

  [[noreturn]] void fail_twice(const std::string& name) const {
    fail(ExitCode::kNoCheckpoint, "{} names {:.200} twice", what_, json(name).dump());
  }

  const std::string& what_;
  const int max_depth_;
  const VisitMember* visit_;
  json root_;
  // Objects and lists that are not complete yet. They stay where they are: nothing is added to a
  // list or object while one inside of it is open.
  std::vector<json*> open_;
  json* slot_ = nullptr;  // of the name that was read last
  std::unordered_set<std::string> names_;
  std::string name_;
  json value_;
};

}  // namespace

json parse_strict(std::string_view text, const std::string& what, int max_depth) {
  Builder builder(what, max_depth, nullptr);
  // For the parser a zero byte ends the text, whatever follows.
  if (text.find('\0') != std::string_view::npos) {
    fail(ExitCode::kNoCheckpoint, "{} is not valid JSON: it has a zero byte", what);
  }
  json::sax_parse(text, &builder);
  return builder.take();
}

void parse_members(std::string_view text, const std::string& what, int max_depth,
                   const VisitMember& visit) {
  Builder builder(what, max_depth, &visit);
  json::sax_parse(text, &builder);
}

}  // namespace sbtrain
