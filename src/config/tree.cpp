#include "config/tree.h"

#include <fmt/format.h>
#include <yaml-cpp/anchor.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <tuple>
#include <unordered_map>

#include "config/values.h"
#include "core/error.h"
#include "core/files.h"
#include "core/installation.h"

namespace sbtrain::schema {
namespace {

constexpr size_t kMaxBytes = 1 << 20;
constexpr size_t kMaxDepth = 64;
constexpr int kMaxValues = 100000;
constexpr int kMaxFiles = 256;
constexpr size_t kMaxProblems = 20;

// Builds a Value from yaml-cpp's events. Working on events instead of YAML::Node keeps the place of
// every key, sees duplicate keys, and bounds what aliases expand to.
class TreeBuilder : public YAML::EventHandler {
 public:
  // Thrown out of the parser when it makes no sense to continue.
  struct Stop {};

  TreeBuilder(int source, Sources& sources) : source_(source), sources_(sources) {}
  Value take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(make(Value::Kind::kNull, mark), anchor);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    check_tag(mark, tag);
    // yaml-cpp does not tell the plain word `null` from a text.
    const bool null = tag == "?" && (text == "null" || text == "~" || text.empty());
    Value value = make(null ? Value::Kind::kNull : Value::Kind::kScalar, mark);
    if (!null) value.text = text;
    add(std::move(value), anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) stop(mark, "an alias inside the value that it names");
    count(found->second, mark);
    add(found->second, YAML::NullAnchor);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(make(Value::Kind::kList, mark), mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(make(Value::Kind::kMap, mark), mark, tag, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  // A list or map that is being filled.
  struct Frame {
    Value value;
    YAML::anchor_t anchor;
    std::optional<Value> key;
    std::unordered_map<std::string, int> lines = {};  // of the keys of a map
  };

  Place place(const YAML::Mark& mark) const {
    if (mark.is_null()) return {source_, 0, 0};
    return {source_, mark.line + 1, mark.column + 1};
  }

  [[noreturn]] void stop(const YAML::Mark& mark, std::string message) {
    sources_.problem(place(mark), std::move(message));
    throw Stop{};
  }

  Value make(Value::Kind kind, const YAML::Mark& mark) {
    if (++values_ > kMaxValues) stop(mark, "too many values for a configuration");
    Value value;
    value.kind = kind;
    value.place = place(mark);
    return value;
  }

  void count(const Value& value, const YAML::Mark& mark) {
    if (++values_ > kMaxValues) stop(mark, "too many values for a configuration");
    for (const Value& item : value.items) count(item, mark);
    for (const Entry& entry : value.entries) count(entry.value, mark);
  }

  void check_tag(const YAML::Mark& mark, const std::string& tag) {
    if (tag.empty() || tag == "?" || tag == "!") return;
    stop(mark, "tags (!...) have no meaning here; leave it out");
  }

  void open(Value value, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    check_tag(mark, tag);
    if (stack_.size() >= kMaxDepth) {
      stop(mark, fmt::format("nested more than {} levels deep", kMaxDepth));
    }
    stack_.push_back({std::move(value), anchor, std::nullopt});
  }

  void close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    add(std::move(frame.value), frame.anchor);
  }

  void add(Value value, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) anchors_[anchor] = value;
    if (stack_.empty()) {
      root_ = std::move(value);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.value.kind == Value::Kind::kList) {
      frame.value.items.push_back(std::move(value));
    } else if (!frame.key) {
      frame.key = std::move(value);
    } else {
      add_entry(frame, *frame.key, std::move(value));
      frame.key.reset();
    }
  }

  void add_entry(Frame& frame, const Value& key, Value value) {
    if (key.kind != Value::Kind::kScalar) {
      sources_.problem(key.place, "a key must be a plain word");
      return;
    }
    const auto [first, fresh] = frame.lines.emplace(key.text, key.place.line);
    if (!fresh) {
      sources_.problem(key.place, fmt::format("duplicate key '{}', first set in line {}", key.text,
                                              first->second));
      return;
    }
    // yaml-cpp reports a missing value at the place of whatever follows.
    if (value.kind == Value::Kind::kNull) value.place = key.place;
    frame.value.entries.push_back({key.text, key.place, std::move(value)});
  }

  int source_;
  Sources& sources_;
  int values_ = 0;
  Value root_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, Value> anchors_;
};

// Returns false and records the problem if the text is too long or is not clean UTF-8.
bool check_bytes(std::string_view text, int source, Sources& sources) {
  if (text.size() > kMaxBytes) {
    sources.problem({source, 0, 0}, "larger than 1 MiB, so it is no configuration");
    return false;
  }
  size_t offset = 0;
  if (is_clean_text(text, "\t\n\r", offset)) return true;
  const std::string_view before = text.substr(0, offset);
  const auto line = static_cast<int>(std::ranges::count(before, '\n'));
  const size_t start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  sources.problem({source, line + 1, static_cast<int>(offset - start) + 1},
                  fmt::format("byte 0x{:02x} is not UTF-8 text",
                              static_cast<unsigned>(static_cast<unsigned char>(text[offset]))));
  return false;
}

bool indented_with_tab(std::string_view text, int line) {
  for (; line > 1 && !text.empty(); --line) {
    text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  }
  return text.substr(0, text.find_first_not_of(" \t")).find('\t') != std::string_view::npos;
}

// Reads files depth first, so that a file's layer is above those of all files that it includes.
class Includer {
 public:
  explicit Includer(Sources& sources) : sources_(sources) {}

  Value read(const std::string& path, const Place& included_at) {
    std::string error;
    const std::string text = try_read_input(path, kMaxBytes + 1, error);  // check_bytes: too long
    if (!error.empty()) {
      const std::string message = fmt::format("cannot read '{}': {}", path, error);
      if (included_at.source < 0) fail(ExitCode::kConfig, "{}", message);
      sources_.problem(included_at, message);
      return {};
    }
    const int source = sources_.add({path, included_at, 0, ""});
    open_.push_back(canonical(path));
    Value root = parse_yaml(text, source, sources_);
    if (root.kind != Value::Kind::kMap && root.kind != Value::Kind::kNull) {
      sources_.problem(root.place,
                       "expected keys and values, got " + std::string(kind_phrase(root.kind)));
      root = {};
    }
    Value merged = read_includes(root, path);
    open_.pop_back();
    sources_[source].layer = ++layers_;
    merge(merged, std::move(root));
    return merged;
  }

 private:
  static std::string canonical(const std::string& path) {
    std::error_code error;
    const std::filesystem::path result = std::filesystem::weakly_canonical(path, error);
    return error ? path : result.string();
  }

  // Paths are relative to the file that includes them; configurations of the program are found
  // wherever that is.
  static std::string included_file(const std::string& from, const std::string& path) {
    const auto beside = (std::filesystem::path(from).parent_path() / path).lexically_normal();
    std::error_code none;
    return std::filesystem::exists(beside, none) || configuration_file(path) == path
               ? beside.string()
               : configuration_file(path);
  }

  // The files that the key `include` of `root` names, merged in order; the key itself is removed.
  Value read_includes(Value& root, const std::string& path) {
    Value merged;
    const Value* found = root.find("include");
    if (found == nullptr) return merged;
    const Value include = *found;
    std::erase_if(root.entries, [](const Entry& entry) { return entry.key == "include"; });
    const std::vector<Value> single = {include};
    for (const Value& item : include.kind == Value::Kind::kList ? include.items : single) {
      if (item.kind != Value::Kind::kScalar || item.text.empty()) {
        sources_.problem(item.place, "include: expected a path or a list of paths");
        continue;
      }
      const std::string next = included_file(path, item.text);
      if (allowed(next, item.place)) merge(merged, read(next, item.place));
    }
    return merged;
  }

  bool allowed(const std::string& path, const Place& place) {
    if (std::ranges::count(open_, canonical(path)) > 0) {
      sources_.problem(place, fmt::format("'{}' includes itself", path));
      return false;
    }
    if (sources_.count() >= kMaxFiles) {
      sources_.problem(place, fmt::format("more than {} files included", kMaxFiles));
      return false;
    }
    return true;
  }

  Sources& sources_;
  std::vector<std::string> open_;  // canonical paths of the files being read, outermost first
  int layers_ = 0;
};

}  // namespace

const Value* Value::find(std::string_view key) const {
  const auto same = [&](const Entry& entry) { return entry.key == key; };
  const auto found = std::ranges::find_if(entries, same);
  return found == entries.end() ? nullptr : &found->value;
}

Value* Value::find(std::string_view key) {
  return const_cast<Value*>(static_cast<const Value*>(this)->find(key));
}

int Sources::add(Source source) {
  sources_.push_back(std::move(source));
  return count() - 1;
}

void Sources::problem(const Place& place, std::string message) {
  problems_.push_back({place, std::move(message)});
}

std::string Sources::locate(const Place& place) const {
  if (place.source < 0) return "configuration";
  const Source& source = (*this)[place.source];
  const bool lines = place.line > 0 && source.key.empty();
  return lines ? fmt::format("{}:{}:{}", source.name, place.line, place.column) : source.name;
}

void Sources::throw_problems() const {
  if (clean()) return;
  std::vector<Problem> sorted = problems_;
  std::ranges::stable_sort(sorted, {}, [](const Problem& problem) {
    return std::tuple(problem.place.source, problem.place.line, problem.place.column);
  });
  std::string text;
  const char* indent = "";
  if (sorted.size() > 1) {
    text = fmt::format("{} problems in the configuration\n", sorted.size());
    indent = "  ";
  }
  for (size_t i = 0; i < std::min(sorted.size(), kMaxProblems); ++i) {
    const Place& place = sorted[i].place;
    text += fmt::format("{}{}: {}\n", indent, locate(place), sorted[i].message);
    Place from = place.source < 0 ? Place{} : (*this)[place.source].included_at;
    for (; from.source >= 0; from = (*this)[from.source].included_at) {
      text += fmt::format("{}  included from {}\n", indent, locate(from));
    }
  }
  if (sorted.size() > kMaxProblems) {
    text += fmt::format("  and {} more\n", sorted.size() - kMaxProblems);
  }
  text.pop_back();
  fail(ExitCode::kConfig, "{}", text);
}

const char* kind_phrase(Value::Kind kind) {
  switch (kind) {
    case Value::Kind::kNull:
      return "nothing";
    case Value::Kind::kScalar:
      return "a single value";
    case Value::Kind::kList:
      return "a list";
    case Value::Kind::kMap:
      return "a map";
  }
  return "";
}

Value parse_yaml(std::string_view text, int source, Sources& sources) {
  if (!check_bytes(text, source, sources)) return {};
  TreeBuilder builder(source, sources);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    if (!parser.HandleNextDocument(builder)) return {};
    Value root = builder.take_root();
    TreeBuilder rest(source, sources);
    if (parser.HandleNextDocument(rest)) {
      sources.problem({source, 0, 0}, "holds several documents (---); one is expected");
    }
    return root;
  } catch (const TreeBuilder::Stop&) {
    return {};
  } catch (const YAML::Exception& error) {
    const Place place = error.mark.is_null()
                            ? Place{source, 0, 0}
                            : Place{source, error.mark.line + 1, error.mark.column + 1};
    // Versions of yaml-cpp differ in whether they name the anchor, which the line shows anyway.
    std::string message = error.msg;
    constexpr std::string_view anchor = "the referenced anchor is not defined";
    if (message.starts_with(anchor)) message = anchor;
    sources.problem(place, fmt::format("YAML syntax: {}{}", message,
                                       indented_with_tab(text, place.line)
                                           ? " (the line is indented with a tab; use spaces)"
                                           : ""));
    return {};
  }
}

Value read_file(const std::string& path, Sources& sources) {
  return Includer(sources).read(configuration_file(path), Place{});
}

void merge(Value& base, Value over) {
  if (over.kind == Value::Kind::kNull && base.kind != Value::Kind::kNull) return;
  if (base.kind != Value::Kind::kMap || over.kind != Value::Kind::kMap) {
    base = std::move(over);
    return;
  }
  std::unordered_map<std::string_view, size_t> places;  // of the keys of `base`
  for (const Entry& entry : base.entries) places.emplace(entry.key, places.size());
  std::vector<Entry> added;
  for (Entry& entry : over.entries) {
    const auto found = places.find(entry.key);
    if (found == places.end()) {
      added.push_back(std::move(entry));
    } else {
      merge(base.entries[found->second].value, std::move(entry.value));
    }
  }
  std::ranges::move(added, std::back_inserter(base.entries));
}

}  // namespace sbtrain::schema
