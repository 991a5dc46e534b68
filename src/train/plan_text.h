// Numbers as plans print them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace sbtrain {

inline std::string grouped(int64_t n) {  // 1,208,083,968
  std::string digits = std::to_string(n);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) digits.insert(i, 1, ',');
  return digits;
}

inline std::string duration_text(double seconds) {
  if (seconds < 10) return fmt::format("{:.2g} seconds", seconds);
  if (seconds < 120) return fmt::format("{:.0f} seconds", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} minutes", seconds / 60);
  if (seconds < 172800) return fmt::format("{:.1f} hours", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

}  // namespace sbtrain
