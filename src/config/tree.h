// Configuration text as a tree of values that know where they were written.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sbtrain::schema {

// Where something was written: a line and column (from 1) of a source. Line 0: no line.
struct Place {
  int source = -1;
  int line = 0;
  int column = 0;
};

struct Source {
  std::string name;   // a file's path, or an override's origin
  Place included_at;  // the `include:` that named this file; source -1: none
  int layer = 0;      // a higher layer overrides a lower one
  std::string key;    // overrides: the key that they set
};

struct Entry;

struct Value {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  Place place;
  std::string text;            // kScalar
  bool quote = false;          // kScalar: printed in quotes where YAML could misread it
  std::vector<Value> items;    // kList
  std::vector<Entry> entries;  // kMap, in the order written, keys unique

  Value* find(std::string_view key);
  const Value* find(std::string_view key) const;
};

struct Entry {
  std::string key;
  Place place;
  Value value;
};

// Every source that has been read, and the problems found in them.
class Sources {
 public:
  int add(Source source);
  Source& operator[](int index) { return sources_[static_cast<size_t>(index)]; }
  const Source& operator[](int index) const { return sources_[static_cast<size_t>(index)]; }
  int count() const { return static_cast<int>(sources_.size()); }
  int layer(const Place& place) const {
    return place.source < 0 ? -1 : (*this)[place.source].layer;
  }

  void problem(const Place& place, std::string message);
  bool clean() const { return problems_.empty(); }
  // Throws ExitCode::kConfig with every problem in the order of the text; returns if there are
  // none.
  void throw_problems() const;

 private:
  struct Problem {
    Place place;
    std::string message;
  };
  std::string locate(const Place& place) const;

  std::vector<Source> sources_;
  std::vector<Problem> problems_;
};

// "a list", for messages.
const char* kind_phrase(Value::Kind kind);

// Parses YAML text that came from `source`. Problems are recorded; a text that cannot be parsed at
// all gives a null value. Aliases are expanded. Tags, several documents, more than 64 levels and
// more than 100,000 values are refused.
Value parse_yaml(std::string_view text, int source, Sources& sources);

// Reads a file and what it includes, merged.
Value read_file(const std::string& path, Sources& sources);

// Maps merge key by key; any other value replaces what was there, except that null replaces
// nothing.
void merge(Value& base, Value over);

}  // namespace sbtrain::schema
