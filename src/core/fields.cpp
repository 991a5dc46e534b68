#include "core/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

namespace sbtrain {

Rule Rule::when(std::string_view key, std::vector<std::string_view> values) const {
  Rule rule = *this;
  rule.conditions.push_back({key, std::move(values)});
  return rule;
}

Rule Rule::needed() const {
  Rule rule = *this;
  rule.required = true;
  return rule;
}

Rule Rule::with_example(double value) const {
  Rule rule = *this;
  rule.example = value;
  return rule;
}

bool Rule::allows(double value) const {
  return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
}

std::string Rule::range() const {
  const bool low = std::isfinite(min);
  const bool high = std::isfinite(max) && max < kMaxCount;
  if (low && high) {
    return fmt::format("{}{} to {}{}", above_min ? "above " : "", min, below_max ? "below " : "",
                       max);
  }
  if (low) return fmt::format("{} {}", above_min ? "above" : "at least", min);
  return high ? fmt::format("{} {}", below_max ? "below" : "at most", max) : "";
}

std::string Rule::condition() const {
  if (conditions.empty()) return "";
  return fmt::format("{} {}", conditions.back().key, fmt::join(conditions.back().values, " | "));
}

Rule at_least(double min) {
  Rule rule;
  rule.min = min;
  return rule;
}
Rule above(double min) {
  Rule rule = at_least(min);
  rule.above_min = true;
  return rule;
}
Rule between(double min, double max) {
  Rule rule = at_least(min);
  rule.max = max;
  return rule;
}
Rule from_to_below(double min, double max) {
  Rule rule = between(min, max);
  rule.below_max = true;
  return rule;
}
Rule one_of(std::vector<std::string_view> choices) {
  Rule rule;
  rule.choices = std::move(choices);
  return rule;
}

}  // namespace sbtrain
