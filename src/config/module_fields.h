// The keys of a section that selects one of several modules, each of which has keys of its own.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "config/fields.h"
#include "core/module_options.h"

namespace sbtrain {

// A module as its registry knows it; the name must stay.
struct DescribedModule {
  std::string_view name;
  std::function<void(Fields&, ModuleOptions&)> describe;
};

// Describes the keys of all modules, each with the condition that the key `selector`, which stands
// in front of them, names one of its modules; those of the module `selected` set `chosen`.
void describe_modules(Fields& f, std::string_view selector,
                      const std::vector<DescribedModule>& modules, std::string_view selected,
                      ModuleOptions& chosen);

}  // namespace sbtrain
