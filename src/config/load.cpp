// From text to Config: files, overrides, the reader that walks the schema, and all messages.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <set>
#include <type_traits>

#include "config/fields.h"
#include "config/keys.h"
#include "config/schema.h"
#include "config/tree.h"
#include "config/validate.h"
#include "config/values.h"
#include "core/error.h"

namespace sbtrain {
namespace schema {
namespace {

std::string shown(const Value& value) {
  return value.kind == Value::Kind::kScalar ? in_quotes(value.text) : kind_phrase(value.kind);
}

// ", as train: {lr: ...}" for "train.lr".
std::string nested_example(const std::string& key) {
  std::string text = "...";
  std::vector<std::string> segments = split_path(key);
  for (; segments.size() > 1; segments.pop_back()) {
    text = fmt::format("{{{}: {}}}", segments.back(), text);
  }
  return fmt::format(", as {}: {}", segments.front(), text);
}

// Fills a Config from a tree: the schema's visitor.
class Reader : public Fields {
 public:
  using Fields::list;
  using Fields::section;

  explicit Reader(Sources& sources) : sources_(sources) {}

  void read(const Describe& describe, const Value& root) {
    if (root.kind != Value::Kind::kMap && root.kind != Value::Kind::kNull) {
      sources_.problem(root.place,
                       fmt::format("expected keys and values, got {}", kind_phrase(root.kind)));
      return;
    }
    visit(describe, root, "");
  }

  void value(std::string_view key, const Member& member, const Rule& rule,
             std::string_view help) override {
    const Value* value = take(key);
    Scope& scope = scopes_.back();
    const Condition* unmet = conditions_.unmet(rule);
    if (unmet != nullptr && !scope.undecided) {
      if (value != nullptr) refuse_inapplicable(key, *value, rule, *unmet);
      return;
    }
    if (value != nullptr) {
      const bool good = std::visit(
          [&](const auto& typed) { return read_value(path(key), *value, typed, rule); }, member);
      // Which other keys apply depends on this one, so nothing is said about them.
      if (!good && decides(member, rule)) scope.undecided = true;
    } else if (rule.required) {
      sources_.problem(scope.map->place, fmt::format("missing key '{}'", path(key)));
    }
    if (decides(member, rule)) conditions_.note(key, to_text(member));
  }

  void section(std::string_view key, const Describe& describe, std::string_view help) override {
    const Value* value = take(key);
    static const Value kNothing;
    if (value == nullptr) value = &kNothing;
    if (value->kind == Value::Kind::kMap || value->kind == Value::Kind::kNull) {
      visit(describe, *value, path(key));
    } else {
      say(value->place, path(key), fmt::format("expected keys and values, got {}", shown(*value)));
    }
  }

  void list(std::string_view key, ListMember& items, const Rule& rule,
            std::string_view help) override {
    const Value* value = take(key);
    if (value == nullptr) return;
    const std::string where = path(key);
    items.clear();
    if (rule.single && value->kind == Value::Kind::kMap) {
      read_item(where, *value, items);
    } else if (value->kind != Value::Kind::kList) {
      say(value->place, where,
          fmt::format("expected {}, got {}",
                      rule.single ? "keys and values, or a list of them" : "a list",
                      shown(*value)));
    } else {
      for (size_t i = 0; i < value->items.size(); ++i) {
        read_item(fmt::format("{}.{}", where, i), value->items[i], items);
      }
    }
  }

  // Where `path` was set, or else the innermost section around it that was.
  Place locate(std::string path, const Place& otherwise) const {
    for (;;) {
      const auto found = places_.find(path);
      if (found != places_.end()) return found->second;
      const size_t dot = path.rfind('.');
      if (dot == std::string::npos) return otherwise;
      path.resize(dot);
    }
  }

  // Records a problem of the key `path`. The message names the key unless the source is an override
  // of that key.
  void say(const Place& place, const std::string& path, const std::string& message) {
    const bool named = place.source >= 0 && sources_[place.source].key == path;
    sources_.problem(place, named ? message : fmt::format("{}: {}", path, message));
  }

 private:
  struct Scope {
    const Value* map;
    std::string path;
    std::set<std::string, std::less<>> known;
    std::map<std::string, int, std::less<>> dropped;  // the layer that made a key inapplicable
    bool undecided = false;  // a choice is wrong, so it is unknown which keys apply
  };

  std::string path(std::string_view key) const {
    const std::string& outer = scopes_.back().path;
    return outer.empty() ? std::string(key) : fmt::format("{}.{}", outer, key);
  }

  const Value* take(std::string_view key) {
    Scope& scope = scopes_.back();
    scope.known.emplace(key);
    const Value* value = scope.map->find(key);
    if (value != nullptr) places_.emplace(path(key), value->place);
    return value;
  }

  void visit(const Describe& describe, const Value& map, const std::string& where) {
    scopes_.push_back({&map, where, {}, {}, false});
    conditions_.enter();
    if (map.place.source >= 0) places_.emplace(where, map.place);
    describe(*this);
    report_unknown();
    conditions_.leave();
    scopes_.pop_back();
  }

  void read_item(const std::string& where, const Value& value, ListMember& items) {
    items.append();
    if (value.kind == Value::Kind::kMap) {
      visit([&](Fields& f) { items.describe_item(f, items.size() - 1); }, value, where);
    } else {
      say(value.place, where, fmt::format("expected keys and values, got {}", shown(value)));
    }
  }

  void report_unknown() {
    const Scope& scope = scopes_.back();
    for (const Entry& entry : scope.map->entries) {
      if (scope.known.contains(entry.key)) continue;
      const std::string full = path(entry.key);
      if (++unknown_ > kMostHints) {  // a hint takes long, and few problems are shown
        sources_.problem(entry.place, "unknown key " + in_quotes(full));
        continue;
      }
      const bool dotted = find_key(full) != nullptr;
      const std::string hint =
          dotted ? "; in a file, write it nested" + nested_example(entry.key) : did_you_mean(full);
      sources_.problem(entry.place, fmt::format("unknown key {}{}", in_quotes(full), hint));
    }
  }

  // A key that the deciding key (`type`) rules out. It is an error if both were written
  // in the same layer, but a lower layer's options are dropped when a higher one changes the type.
  void refuse_inapplicable(std::string_view key, const Value& value, const Rule& rule,
                           const Condition& unmet) {
    Scope& scope = scopes_.back();
    const Value* decider = scope.map->find(unmet.key);
    int decided = decider == nullptr ? -1 : sources_.layer(decider->place);
    const auto lapsed = scope.dropped.find(unmet.key);
    if (lapsed != scope.dropped.end()) decided = std::max(decided, lapsed->second);
    if (sources_.layer(value.place) < decided) {
      scope.dropped.emplace(key, decided);
      return;
    }
    say(value.place, path(key), fmt::format("has a meaning only with {}", rule.condition()));
  }

  template <class T>
  bool read_value(const std::string& where, const Value& value, T* member, const Rule& rule) {
    T parsed{};
    if (value.kind != Value::Kind::kScalar || !from_text(value.text, parsed)) {
      const std::string limits = exceeded_limits<T>(value);
      if (!limits.empty()) {
        say(value.place, where, fmt::format("{} is out of range: {}", value.text, limits));
        return false;
      }
      say(value.place, where, fmt::format("expected {}, got {}", expected<T>(rule), shown(value)));
      return false;
    }
    if constexpr (std::is_same_v<T, std::string>) {
      if (!rule.choices.empty() && !is_choice(where, value, parsed, rule)) return false;
    } else if (!rule.allows(magnitude(parsed))) {
      say(value.place, where,
          fmt::format("{} is out of range: {}", value.text, rule_text(rule, magnitude(parsed))));
      return false;
    }
    *member = parsed;
    return true;
  }

  bool read_value(const std::string& where, const Value& value, const EnumMember& member,
                  const Rule& rule) {
    std::string name;
    if (!read_value(where, value, &name, rule)) return false;
    member.set(name);
    return true;
  }

  bool read_value(const std::string& where, const Value& value, std::vector<std::string>* member,
                  const Rule& rule) {
    const std::vector<Value> single = {value};
    std::vector<std::string> parsed;
    bool good = value.kind == Value::Kind::kScalar || value.kind == Value::Kind::kList;
    if (!good) {
      say(value.place, where, fmt::format("expected a list of texts, got {}", shown(value)));
      return false;
    }
    for (const Value& item : value.kind == Value::Kind::kList ? value.items : single) {
      good = read_value(fmt::format("{}.{}", where, parsed.size()), item, &parsed.emplace_back(),
                        Rule{}) &&
             good;
    }
    if (good) *member = parsed;
    return good;
  }

  bool is_choice(const std::string& where, const Value& value, const std::string& word,
                 const Rule& rule) {
    if (std::ranges::count(rule.choices, word) > 0) return true;
    const std::string near = nearest(word, {rule.choices.begin(), rule.choices.end()});
    say(value.place, where,
        fmt::format("expected {}, got {}{}", expected<std::string>(rule), shown(value),
                    near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
    return false;
  }

  template <class T>
  static std::string expected(const Rule& rule) {
    return rule.choices.empty() ? type_names(T{}).phrase
                                : fmt::format("one of {}", fmt::join(rule.choices, ", "));
  }

  // The range of T, if `value` is a whole number outside of it.
  template <class T>
  static std::string exceeded_limits(const Value& value) {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      using Limits = std::numeric_limits<T>;
      double number = 0;
      if (from_text(value.text, number) && std::trunc(number) == number) {
        return fmt::format("{} to {}", Limits::min(), Limits::max());
      }
    }
    return "";
  }

  // The bound that `value` exceeds, if the range does not state it: kMaxCount.
  static std::string rule_text(const Rule& rule, double value) {
    return value > rule.max && rule.max >= kMaxCount ? fmt::format("at most {:g}", rule.max)
                                                     : rule.range();
  }

  static constexpr int kMostHints = 200;
  int unknown_ = 0;
  Sources& sources_;
  Conditions conditions_;
  std::vector<Scope> scopes_;
  std::map<std::string, Place> places_;
};

// Every value of an override is placed at the override itself.
void place_all(Value& value, const Place& place) {
  value.place = place;
  for (Value& item : value.items) place_all(item, place);
  for (Entry& entry : value.entries) {
    entry.place = place;
    place_all(entry.value, place);
  }
}

// Sets keys of a tree from outside the file.
class Overrider {
 public:
  Overrider(Value& root, Sources& sources, int layer)
      : root_(root), sources_(sources), layer_(layer) {}

  void apply(const Override& change) {
    const Place place{sources_.add({change.origin, Place{}, layer_, change.key}), 0, 0};
    const Key* key = find_key(change.key);
    if (key == nullptr || change.key.find('*') != std::string::npos) {
      sources_.problem(
          place, fmt::format("unknown key {}{}", in_quotes(change.key), did_you_mean(change.key)));
      return;
    }
    Value value = parse(*key, change.key, change.value, place);
    Value* target = locate(change.key, place);
    if (target != nullptr) merge(*target, std::move(value));
  }

 private:
  // The value that the override of `key` at `path` gives. A scalar's text is taken literally,
  // without YAML's quoting.
  Value parse(const Key& key, const std::string& path, const std::string& text,
              const Place& place) {
    Value value;
    const bool item = is_index(split_path(path).back());
    const bool one_text = key.kind == Key::Kind::kTexts && (item || !text.starts_with('['));
    if (key.kind == Key::Kind::kScalar || one_text) {
      value.kind = Value::Kind::kScalar;
      value.text = text;
    } else {
      value = parse_yaml(text, place.source, sources_);
    }
    place_all(value, place);
    return value;
  }

  // The value at `path`, which is made if there is none. If that is impossible, records the problem
  // and returns null.
  Value* locate(const std::string& path, const Place& place) {
    Value* value = &root_;
    std::string walked;
    for (const std::string& segment : split_path(path)) {
      value = is_index(segment) ? item(*value, walked, segment, place)
                                : member(*value, walked, segment, place);
      if (value == nullptr) return nullptr;
      walked += (walked.empty() ? "" : ".") + segment;
    }
    return value;
  }

  Value* member(Value& value, const std::string& walked, const std::string& key,
                const Place& place) {
    if (value.kind == Value::Kind::kList) {
      sources_.problem(place, fmt::format("'{}' is a list here; name the item, as in '{}.0.{}'",
                                          walked, walked, key));
      return nullptr;
    }
    if (value.kind != Value::Kind::kMap) value = make(Value::Kind::kMap, place);
    Value* found = value.find(key);
    if (found != nullptr) return found;
    value.entries.push_back({key, place, make(Value::Kind::kNull, place)});
    return &value.entries.back().value;
  }

  Value* item(Value& value, const std::string& walked, const std::string& segment,
              const Place& place) {
    const size_t index = std::stoul(segment);
    // A single item that is written without a list is item 0.
    if (value.kind == Value::Kind::kMap && index == 0) return &value;
    if (value.kind == Value::Kind::kMap || value.kind == Value::Kind::kScalar) {
      Value only = std::move(value);
      value = make(Value::Kind::kList, place);
      value.items.push_back(std::move(only));
    }
    if (value.kind == Value::Kind::kNull) value = make(Value::Kind::kList, place);
    const size_t count = value.items.size();
    if (index > count) {
      sources_.problem(place, fmt::format("'{}' has {} item{}; the next index is {}", walked, count,
                                          count == 1 ? "" : "s", count));
      return nullptr;
    }
    if (index == count) value.items.push_back(make(Value::Kind::kNull, place));
    return &value.items[index];
  }

  static Value make(Value::Kind kind, const Place& place) {
    Value value;
    value.kind = kind;
    value.place = place;
    return value;
  }

  Value& root_;
  Sources& sources_;
  int layer_;
};

// Turns epochs of a task into tokens. Without a task they stay, and validation reports them.
void resolve_epochs(Config& config) {
  if (!config.data.task.active()) return;
  const double per_epoch = static_cast<double>(config.data.task.examples) *
                           static_cast<double>(config.train.sequence_length);
  for_each_duration(config, [&](const std::string&, Duration& duration) {
    if (duration.unit != Duration::Unit::kEpochs) return;
    const double tokens = static_cast<double>(duration.count) * per_epoch;
    duration = {static_cast<int64_t>(std::min(tokens, kMaxCount)), Duration::Unit::kTokens};
  });
}

using Check = std::vector<CrossProblem> (*)(const Config&);

Config finish(Value root, const std::vector<Override>& overrides, Sources& sources,
              std::initializer_list<Check> checks = {cross_field_problems}) {
  sources.throw_problems();  // an incomplete tree cannot be checked any further
  Overrider overrider(root, sources, sources.count() + 1);
  for (const Override& change : overrides) overrider.apply(change);

  Config config;
  Reader reader(sources);
  reader.read([&](Fields& f) { describe(f, config); }, root);
  sources.throw_problems();
  resolve_epochs(config);

  for (const Check check : checks) {
    for (const CrossProblem& problem : check(config)) {
      const Place whole{sources.count() > 0 ? 0 : -1, 0, 0};
      reader.say(reader.locate(problem.key, whole), problem.key, problem.message);
    }
  }
  sources.throw_problems();
  return config;
}

}  // namespace
}  // namespace schema

Config load_config(const std::string& path, const std::vector<Override>& overrides) {
  schema::Sources sources;
  schema::Value root;
  if (!path.empty()) root = schema::read_file(path, sources);
  return schema::finish(std::move(root), overrides, sources,
                        {schema::cross_field_problems, schema::allowed_change_problems});
}

Config parse_config(std::string_view text, std::string_view name,
                    const std::vector<Override>& overrides) {
  schema::Sources sources;
  const int source = sources.add({std::string(name), {}, 0, ""});
  schema::Value root = schema::parse_yaml(text, source, sources);
  return schema::finish(std::move(root), overrides, sources);
}

AttentionConfig parse_attention(std::string_view text) {
  schema::Sources sources;
  const int source = sources.add({"attention", {}, 0, ""});
  const schema::Value root = schema::parse_yaml(text, source, sources);
  AttentionConfig config;
  schema::Reader(sources).read([&](Fields& f) { describe(f, config); }, root);
  sources.throw_problems();
  return config;
}

std::vector<Override> environment_overrides(const char* const* environment) {
  constexpr std::string_view kPrefix = "SBTRAIN_";
  // Read by the op in PyTorch, by scripts and by tests. Who exports them for good trains as well.
  constexpr std::string_view kNoKeys[] = {"SBTRAIN_ATTENTION_LIBRARY", "SBTRAIN_BUILD",
                                          "SBTRAIN_LM_EVAL",           "SBTRAIN_PYTHON",
                                          "SBTRAIN_WRITE_GOLDEN",      "SBTRAIN_ZIG"};
  std::vector<Override> overrides;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::string_view variable = *environment;
    const size_t equals = variable.find('=');
    if (!variable.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    const std::string_view name = variable.substr(0, equals);
    if (std::ranges::find(kNoKeys, name) != std::end(kNoKeys)) continue;
    std::string key;
    for (size_t i = kPrefix.size(); i < name.size(); ++i) {
      const bool dot = name.substr(i, 2) == "__";
      const char c = name[i];
      key += dot ? '.' : c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      if (dot) ++i;
    }
    overrides.push_back({key, std::string(variable.substr(equals + 1)), std::string(name)});
  }
  std::ranges::sort(overrides, {}, &Override::key);  // the environment has no order of its own
  return overrides;
}

Override parse_override(std::string_view assignment) {
  const size_t equals = assignment.find('=');
  const std::string key(assignment.substr(0, equals));
  if (equals == std::string_view::npos) {
    fail(ExitCode::kUsage, "--{} needs a value: --{}=VALUE", key, key);
  }
  return {key, std::string(assignment.substr(equals + 1)), "--" + key};
}

}  // namespace sbtrain
