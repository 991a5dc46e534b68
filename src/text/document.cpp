#include "text/document.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/error.h"

namespace sbtrain {
namespace {

// Keeps the two strings of a record and drops everything else as it is read, so that a line needs
// no more memory than its longest string, however deep it nests.
class RecordParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit RecordParser(const RecordKeys& keys) : keys_(keys) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(int64_t) override { return value(); }
  bool number_unsigned(uint64_t) override { return value(); }
  bool number_float(double, const std::string&) override { return value(); }
  bool binary(nlohmann::json::binary_t&) override { return value(); }
  bool string(std::string& text) override {
    if (depth_ == 0) return refuse("it is no object");
    if (at(keys_.text)) {
      text_ = std::move(text);
      has_text_ = true;
    } else if (at(keys_.source)) {
      source_ = std::move(text);
    }
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ > 0 && !value()) return false;
    return enter();
  }
  bool start_array(size_t) override {
    if (!value()) return false;
    // A key of "[" is no key of the record, so nothing within an array is taken for its text.
    enter();
    if (depth_ <= kDepth) path_ += '[';
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ > kDepth) return true;
    path_.resize(lengths_[depth_ - 1]);
    if (depth_ > 1) path_ += '.';
    path_.append(name, 0, kKeyBytes);
    return true;
  }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    // After this marker the message quotes the input, which may have any length.
    const std::string_view what = error.what();
    return refuse(std::string(what.substr(0, std::min<size_t>(what.find("; last read"), 200))));
  }

  // Why the line is refused; empty if it is accepted.
  const std::string& problem() {
    if (problem_.empty() && !has_text_) problem_ = fmt::format("it has no \"{}\"", keys_.text);
    return problem_;
  }
  std::string& text() { return text_; }
  std::string& source() { return source_; }

 private:
  // Deeper and longer keys are not compared, so that they need no memory.
  static constexpr size_t kDepth = 16;
  static constexpr size_t kKeyBytes = 1024;

  bool at(const std::string& key) const { return depth_ <= kDepth && path_ == key; }
  // Handles a value that is not a string.
  bool value() {
    if (depth_ == 0) return refuse("it is no object");
    for (const std::string* key : {&keys_.text, &keys_.source}) {
      if (at(*key)) return refuse(fmt::format("its \"{}\" is no string", *key));
    }
    return true;
  }
  bool enter() {
    if (depth_ < kDepth) lengths_[depth_] = path_.size();
    ++depth_;
    return true;
  }
  bool leave() {
    --depth_;
    if (depth_ < kDepth) path_.resize(lengths_[depth_]);
    return true;
  }
  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  const RecordKeys& keys_;
  size_t depth_ = 0;
  std::string path_;                      // the keys that lead to the current value
  std::array<size_t, kDepth> lengths_{};  // of the path at which each object and array starts
  std::string text_;
  std::string source_;
  std::string problem_;
  bool has_text_ = false;
};

}  // namespace

Document parse_document(RawDocument raw) {
  const DocumentOrigin& origin = *raw.origin;
  if (raw.kind != RawDocument::Kind::kJson) {
    if (raw.source.empty()) raw.source = origin.source;
    return {.source = std::move(raw.source), .text = std::move(raw.data)};
  }
  if (!raw.problem.empty()) {
    fail(ExitCode::kData, "{}:{}: {}", origin.name, raw.position, raw.problem);
  }
  RecordParser parser(origin.keys);
  nlohmann::json::sax_parse(raw.data, &parser);
  if (!parser.problem().empty()) {
    fail(ExitCode::kData, "{}:{}: not a JSON object with a string \"{}\": {}", origin.name,
         raw.position, origin.keys.text, parser.problem());
  }
  if (parser.source().empty()) parser.source() = origin.source;
  return {.source = std::move(parser.source()), .text = std::move(parser.text())};
}

}  // namespace sbtrain
