// A Config as YAML and as a flat list of keys.
#include <fmt/format.h>

#include <algorithm>

#include "config/fields.h"
#include "config/schema.h"
#include "config/tree.h"
#include "config/values.h"

namespace sbtrain {
namespace schema {
namespace {

// The schema's visitor that turns a Config into a tree, leaving out what does not apply.
class Writer {
 public:
  template <class T>
  void field(std::string_view key, T& member, const Rule& rule, std::string_view help) {
    if (!conditions_.applies(rule)) return;
    if constexpr (std::is_same_v<T, std::string>) conditions_.note(key, member);
    add(key, scalar(to_text(member), std::is_same_v<T, std::string>));
  }

  void field(std::string_view key, std::vector<std::string>& member, const Rule& rule,
             std::string_view help) {
    Value list = make(Value::Kind::kList);
    for (const std::string& text : member) list.items.push_back(scalar(text, true));
    add(key, std::move(list));
  }

  template <class T>
  void section(std::string_view key, T& member, std::string_view help) {
    add(key, map_of(member));
  }

  template <class T>
  void list(std::string_view key, std::vector<T>& member, const Rule& rule, std::string_view help) {
    if (rule.single && member.size() == 1) {
      add(key, map_of(member.front()));
      return;
    }
    Value list = make(Value::Kind::kList);
    for (T& item : member) list.items.push_back(map_of(item));
    add(key, std::move(list));
  }

  template <class T>
  Value map_of(T& member) {
    maps_.push_back(make(Value::Kind::kMap));
    conditions_.enter();
    describe(*this, member);
    conditions_.leave();
    Value map = std::move(maps_.back());
    maps_.pop_back();
    return map;
  }

 private:
  static Value make(Value::Kind kind) {
    Value value;
    value.kind = kind;
    return value;
  }

  static Value scalar(std::string text, bool quote) {
    Value value = make(Value::Kind::kScalar);
    value.text = std::move(text);
    value.quote = quote;
    return value;
  }

  void add(std::string_view key, Value value) {
    maps_.back().entries.push_back({std::string(key), {}, std::move(value)});
  }

  Conditions conditions_;
  std::vector<Value> maps_;  // being filled, outermost first
};

// Plain where YAML cannot take it for anything but this text, in double quotes otherwise.
std::string scalar_yaml(const Value& value) {
  const std::string& text = value.text;
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '/' || c == '-';
  };
  const bool letter = !text.empty() && text.front() != '-' && text.front() != '.';
  const bool null = text == "null" || text == "Null" || text == "NULL";
  if (!value.quote || (letter && !null && std::ranges::all_of(text, plain))) return text;
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

std::string flow_list(const Value& list) {
  std::string text = "[";
  for (const Value& item : list.items) {
    text += (text.size() > 1 ? ", " : "") + scalar_yaml(item);
  }
  return text + "]";
}

bool is_flow(const Value& value) {
  return value.kind == Value::Kind::kList && std::ranges::all_of(value.items, [](const Value& v) {
           return v.kind == Value::Kind::kScalar;
         });
}

void print_map(const Value& map, const std::string& indent, std::string& out);

void print_entry(const Entry& entry, const std::string& indent, std::string& out) {
  const Value& value = entry.value;
  out += entry.key + ":";
  if (value.kind == Value::Kind::kMap) {
    out += '\n';
    print_map(value, indent + "  ", out);
  } else if (value.kind == Value::Kind::kScalar) {
    out += ' ' + scalar_yaml(value) + '\n';
  } else if (is_flow(value)) {
    out += ' ' + flow_list(value) + '\n';
  } else {
    out += '\n';
    for (const Value& item : value.items) {
      // The item's first key stands behind the dash.
      std::string text;
      print_map(item, indent + "    ", text);
      text.replace(0, indent.size() + 4, indent + "  - ");
      out += text;
    }
  }
}

void print_map(const Value& map, const std::string& indent, std::string& out) {
  for (const Entry& entry : map.entries) {
    out += indent;
    print_entry(entry, indent, out);
  }
}

void flatten_into(const Value& value, const std::string& path,
                  std::map<std::string, std::string>& flat) {
  const std::string prefix = path.empty() ? "" : path + ".";
  for (const Entry& entry : value.entries) flatten_into(entry.value, prefix + entry.key, flat);
  for (size_t i = 0; i < value.items.size(); ++i) {
    flatten_into(value.items[i], fmt::format("{}{}", prefix, i), flat);
  }
  if (value.kind == Value::Kind::kScalar) flat[path] = value.text;
  if (value.kind == Value::Kind::kList && value.items.empty()) flat[path] = "[]";
}

Value to_tree(Config config) {
  return Writer().map_of(config);
}

}  // namespace
}  // namespace schema

std::string config_yaml(const Config& config) {
  std::string out;
  schema::print_map(schema::to_tree(config), "", out);
  return out;
}

std::map<std::string, std::string> flatten(const Config& config) {
  std::map<std::string, std::string> flat;
  schema::flatten_into(schema::to_tree(config), "", flat);
  return flat;
}

}  // namespace sbtrain
