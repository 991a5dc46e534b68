// Options whose values are the names of an enumeration's values.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "core/enum_names.h"

namespace sbtrain {

// Adds `option`, which accepts one of kNames<E> and sets `value`. `value` is also the default.
template <class E>
CLI::Option* add_choice(CLI::App& command, const std::string& option, E& value,
                        const std::string& help) {
  std::vector<std::string> words;
  for (const EnumName<E>& entry : kNames<E>) words.emplace_back(entry.name);
  const auto set = [&value](const std::string& word) {
    for (const EnumName<E>& entry : kNames<E>) {
      if (entry.name == word) value = entry.value;
    }
  };
  return command.add_option_function<std::string>(option, set, help)
      ->check(CLI::IsMember(words))
      ->default_str(std::string(name_of(value)));
}

}  // namespace sbtrain
