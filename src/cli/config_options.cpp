#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "cli/cli.h"
#include "config/schema.h"

namespace sbtrain {
namespace {

std::vector<Override> all_overrides(const std::vector<std::string>& assignments) {
  std::vector<Override> overrides = environment_overrides(environ);
  for (const std::string& assignment : assignments) {
    overrides.push_back(parse_override(assignment));
  }
  return overrides;
}

}  // namespace

void ConfigOptions::add(Command command, bool list_keys) {
  const char* group = "Configuration";
  command.add_option("-c,--config", path, "YAML file with the configuration")
      .type_name("FILE")
      .group(group);
  command.add_option("--set", overrides, "Set one key; --train.lr=1e-3 is short for it")
      .type_name("KEY=VALUE")
      .allow_extra_args(false)
      .group(group);
  for (const auto& [key, help] : top_level_keys()) {
    const std::string name = "--" + key;
    if (command.has_option(name)) continue;
    const auto store = [this, key = key](const std::string& value) {
      overrides.push_back(fmt::format("{}={}", key, value));
    };
    command.add_setter(name, store, help).type_name("VALUE").group(group);
  }
  if (list_keys) command.footer([] { return config_help(); });
}

Config ConfigOptions::load() const {
  const std::vector<Override> changes = all_overrides(overrides);
  const bool stages = std::ranges::any_of(
      changes, [](const Override& change) { return change.key.starts_with("stages"); });
  if (path.empty() && !stages) {
    fail(ExitCode::kUsage,
         "there is no configuration: name its file, such as --config configs/tiny_sb.yaml");
  }
  return load_config(path, changes);
}

Config ConfigOptions::load_on(const std::string& text, const std::string& name) const {
  return parse_config(text, name, all_overrides(overrides));
}

}  // namespace sbtrain
