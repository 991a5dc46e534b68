// The words that configurations, messages and files use for the values of an enumeration. They are
// written once, beside the enumeration:
//
//   enum class Packing : uint8_t { kConcat, kBestFit };
//   template <>
//   inline constexpr auto kNames<Packing> =
//       enum_names<Packing>({{Packing::kConcat, "concat"}, {Packing::kBestFit, "best_fit"}});
//
// The order is the one in which help and documentation list them.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace sbtrain {

template <class E>
struct EnumName {
  E value;
  std::string_view name;
};

template <class E, size_t N>
constexpr std::array<EnumName<E>, N> enum_names(const EnumName<E> (&names)[N]) {
  return std::to_array(names);
}

template <class E>
inline constexpr std::array<EnumName<E>, 0> kNames{};

// The word for `value`; empty when it has none.
template <class E>
constexpr std::string_view name_of(E value) {
  for (const EnumName<E>& entry : kNames<E>) {
    if (entry.value == value) return entry.name;
  }
  return {};
}

}  // namespace sbtrain
