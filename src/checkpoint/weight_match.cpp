#include "checkpoint/weight_match.h"

#include <fmt/ranges.h>

#include <set>

#include "core/error.h"

namespace sbtrain {

WeightMatch match_weights(const WeightSource& source, const ParamRegistry& registry) {
  WeightMatch match;
  std::set<std::string> known;
  for (const ParamUnit& unit : registry.units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      known.insert(tensor.name);
      if (!source.has(tensor.name)) {
        match.missing.push_back(tensor.name);
      } else if (const std::vector<int64_t>& shape = source.shape(tensor.name);
                 shape != tensor.spec.shape) {
        match.misshapen.push_back(fmt::format("{} has shape [{}] where the model has [{}]",
                                              tensor.name, fmt::join(shape, ", "),
                                              fmt::join(tensor.spec.shape, ", ")));
      }
    }
  }
  for (const std::string& name : source.names()) {
    if (known.count(name) == 0) match.unexpected.push_back(name);
  }
  return match;
}

void check_match(const WeightMatch& match, const std::string& source, bool accept_names) {
  std::string text;
  const auto list = [&](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) text += fmt::format("\n{}:\n  {}", title, fmt::join(names, "\n  "));
  };
  if (!accept_names) {
    list("The model has, and the weights lack", match.missing);
    list("The weights have, and the model lacks", match.unexpected);
  }
  list("Different shapes", match.misshapen);
  if (text.empty()) return;
  fail(ExitCode::kConfig, "{}: these are not the weights of the configured model.{}", source, text);
}

}  // namespace sbtrain
