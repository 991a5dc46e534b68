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
class Writer : public Fields {
 public:
  using Fields::list;
  using Fields::section;

  void value(std::string_view key, const Member& member, const Rule& rule,
             std::string_view help) override {
    if (!conditions_.applies(rule)) return;
    if (const auto* texts = std::get_if<std::vector<std::string>*>(&member)) {
      Value list = make(Value::Kind::kList);
      for (const std::string& text : **texts) list.items.push_back(scalar(text, true));
      add_value(key, std::move(list));
      return;
    }
    const bool words = !rule.choices.empty();
    if (decides(member, rule)) conditions_.note(key, to_text(member));
    add_value(key, scalar(to_text(member), words || std::holds_alternative<std::string*>(member)));
  }

  void section(std::string_view key, const Describe& describe, std::string_view help) override {
    add_value(key, map_of(describe));
  }

  void list(std::string_view key, ListMember& items, const Rule& rule,
            std::string_view help) override {
    const auto item = [&](size_t i) {
      return map_of([&](Fields& f) { items.describe_item(f, i); });
    };
    if (rule.single && items.size() == 1) {
      add_value(key, item(0));
      return;
    }
    Value list = make(Value::Kind::kList);
    for (size_t i = 0; i < items.size(); ++i) list.items.push_back(item(i));
    add_value(key, std::move(list));
  }

  Value map_of(const Describe& describe) {
    maps_.push_back(make(Value::Kind::kMap));
    conditions_.enter();
    describe(*this);
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

  void add_value(std::string_view key, Value value) {
    maps_.back().entries.push_back({std::string(key), {}, std::move(value)});
  }

  Conditions conditions_;
  std::vector<Value> maps_;  // being filled, outermost first
};

// Plain if YAML can only read it as this text, otherwise in double quotes.
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
      // The item's first key stands after the dash.
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

template <class C>
Value to_tree(C config) {
  return Writer().map_of([&](Fields& f) { describe(f, config); });
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

std::map<std::string, std::string> flatten(const AttentionConfig& config) {
  std::map<std::string, std::string> flat;
  schema::flatten_into(schema::to_tree(config), "", flat);
  return flat;
}

}  // namespace sbtrain
