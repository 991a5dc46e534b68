// Tables of fields: everything that is known of the members of a struct of settings, stated once.
// Each such struct has a function beside it,
//
//   void describe(Fields& f, TrainConfig& c) {
//     f.add("lr", c.lr, at_least(0), "Peak learning rate.");
//     ...
//   }
//
// and parsing, validation, overrides, printing, --help and docs/config.md follow from it
// (config/schema.h): each of them is a class derived from Fields, which `describe` calls for every
// key with the member that the key sets. Defaults are the members' initial values.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/duration.h"
#include "core/enum_names.h"

namespace sbtrain {

// The key applies only while `key` of the same section has one of `values`.
struct Condition {
  std::string_view key;
  std::vector<std::string_view> values;
  bool operator==(const Condition&) const = default;
};

// What a value must satisfy, and when its key applies.
struct Rule {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;                 // min itself is excluded
  bool below_max = false;                 // max itself is excluded
  std::vector<std::string_view> choices;  // the words allowed; for an enumeration, its names
  bool required = false;
  std::optional<double> example;      // for tests: a number other than the default
  bool single = false;                // lists: one item may be written without a list
  std::vector<Condition> conditions;  // the key applies when all of them hold

  Rule when(std::string_view key, std::vector<std::string_view> values) const;
  Rule needed() const;
  Rule with_example(double value) const;
  bool allows(double value) const;
  std::string range() const;      // "at least 1"; empty without bounds
  std::string condition() const;  // the last one: "position rope"; empty without conditions
  bool operator==(const Rule&) const = default;
};

Rule at_least(double min);
Rule above(double min);
Rule between(double min, double max);
Rule from_to_below(double min, double max);
Rule one_of(std::vector<std::string_view> choices);

// Bounds that keep every product of sizes far inside 64 bits.
inline constexpr double kMaxSize = 1 << 24;
inline constexpr double kMaxCount = 1e18;

// A member that is an enumeration, read and set by the words for its values.
class EnumMember {
 public:
  template <class E>
  explicit EnumMember(E& member)
      : get_([&member] { return name_of(member); }), set_([&member](std::string_view name) {
          for (const EnumName<E>& entry : kNames<E>) {
            if (entry.name == name) member = entry.value;
          }
        }) {}
  std::string_view get() const { return get_(); }
  void set(std::string_view name) const { set_(name); }  // one of the names

 private:
  std::function<std::string_view()> get_;
  std::function<void(std::string_view)> set_;
};

using Member = std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, Duration*,
                            std::vector<std::string>*, EnumMember>;

// A member that is a list of structs with keys of their own.
class ListMember {
 public:
  virtual ~ListMember() = default;
  virtual size_t size() const = 0;
  virtual void clear() = 0;
  virtual void append() = 0;  // an item with its defaults
  virtual void describe_item(class Fields& f, size_t index) = 0;
  virtual void describe_default(Fields& f) = 0;
};

class Fields {
 public:
  virtual ~Fields() = default;

  template <class T>
  void add(std::string_view key, T& member, std::string_view help) {
    add(key, member, Rule{}, help);
  }
  template <class T>
  void add(std::string_view key, T& member, Rule rule, std::string_view help) {
    if constexpr (std::is_enum_v<T>) {
      static_assert(!kNames<T>.empty(), "the enumeration needs kNames");
      for (const EnumName<T>& entry : kNames<T>) rule.choices.push_back(entry.name);
      value(key, EnumMember(member), rule, help);
    } else {
      value(key, &member, rule, help);
    }
  }
  template <class T>
  void section(std::string_view key, T& member, std::string_view help) {
    section(
        key, [&member](Fields& f) { describe(f, member); }, help);
  }
  template <class T>
  void list(std::string_view key, std::vector<T>& member, const Rule& rule, std::string_view help) {
    ListOf<T> items(member);
    list(key, items, rule, help);
  }

  // A key may belong to several alternatives, each of which describes it in its own way. True: it
  // is added once for each description (documentation); false: once, as the selected alternative
  // describes it.
  virtual bool lists_alternatives() const { return false; }

  using Describe = std::function<void(Fields&)>;
  virtual void value(std::string_view key, const Member& member, const Rule& rule,
                     std::string_view help) = 0;
  virtual void section(std::string_view key, const Describe& describe, std::string_view help) = 0;
  virtual void list(std::string_view key, ListMember& items, const Rule& rule,
                    std::string_view help) = 0;

 private:
  template <class T>
  class ListOf : public ListMember {
   public:
    explicit ListOf(std::vector<T>& items) : items_(items) {}
    size_t size() const override { return items_.size(); }
    void clear() override { items_.clear(); }
    void append() override { items_.emplace_back(); }
    void describe_item(Fields& f, size_t index) override { describe(f, items_[index]); }
    void describe_default(Fields& f) override {
      T item{};
      describe(f, item);
    }

   private:
    std::vector<T>& items_;
  };
};

}  // namespace sbtrain
