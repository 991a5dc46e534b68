// What the readers, writers and collectors of the schema (schema.cpp) have in common.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/fields.h"
#include "train/run_config.h"

namespace sbtrain {

void describe(Fields& f, Config& c);
void describe(Fields& f, AttentionConfig& c);
// Keys of the section that an optimizer is chosen in.
void describe(Fields& f, OptimizerConfig& c);

namespace schema {

// Whether other keys may apply only for some values of this one: it is a word or a flag.
inline bool decides(const Member& member, const Rule& rule) {
  return !rule.choices.empty() || std::holds_alternative<bool*>(member);
}

// The choices that the section being visited has shown so far, which tell whether a rule applies.
class Conditions {
 public:
  void enter() { scopes_.emplace_back(); }
  void leave() { scopes_.pop_back(); }
  void note(std::string_view key, std::string_view value) {
    scopes_.back().emplace_back(key, value);
  }
  // The first condition of `rule` that does not hold; null where all do.
  const Condition* unmet(const Rule& rule) const;
  bool applies(const Rule& rule) const { return unmet(rule) == nullptr; }

 private:
  std::vector<std::vector<std::pair<std::string, std::string>>> scopes_;
};

}  // namespace schema
}  // namespace sbtrain
