#include "config/fields.h"

#include <algorithm>

namespace sbtrain::schema {

const Condition* Conditions::unmet(const Rule& rule) const {
  const auto holds = [&](const Condition& condition) {
    for (const auto& [key, value] : scopes_.back()) {
      if (key == condition.key) return std::ranges::count(condition.values, value) > 0;
    }
    return false;  // the deciding key does not apply itself
  };
  const auto found = std::ranges::find_if_not(rule.conditions, holds);
  return found == rule.conditions.end() ? nullptr : &*found;
}

}  // namespace sbtrain::schema
