// sbtrain config: the configuration that a run would use, and the reference of all keys.
#include <cstdio>
#include <memory>

#include "cli/cli.h"
#include "config/schema.h"

namespace sbtrain {
namespace {

struct ShowOptions {
  ConfigOptions config;
  bool flat = false;
};

ExitCode run_show(const ShowOptions& options) {
  const Config config = options.config.load();
  if (!options.flat) {
    std::fputs(config_yaml(config).c_str(), stdout);
    return ExitCode::kDone;
  }
  for (const auto& [key, value] : flatten(config)) {
    std::printf("%s=%s\n", key.c_str(), value.c_str());
  }
  return ExitCode::kDone;
}

ExitCode run_docs(const std::string& key) {
  std::fputs(key.empty() ? config_markdown().c_str() : field_help(key).c_str(), stdout);
  return ExitCode::kDone;
}

}  // namespace

void add_config(Command app, Action& action) {
  Command config =
      app.add_subcommand("config", "Show a resolved configuration, or the reference of all keys");
  config.require_subcommand(1);

  auto options = std::make_shared<ShowOptions>();
  Command show = config.add_subcommand(
      "show", "Print the configuration that a run would use: files, environment and options");
  show.add_flag("--flat", options->flat, "One line for each key, as key=value");
  options->config.add(show, /*list_keys=*/true);
  show.callback([options, &action] { action = [options] { return run_show(*options); }; });

  auto key = std::make_shared<std::string>();
  Command docs = config.add_subcommand(
      "docs", "Print the reference of all keys as Markdown, or one key's meaning");
  docs.add_option("KEY", *key, "A key or section, such as train.lr or stages.*.schedule");
  docs.callback([key, &action] { action = [key] { return run_docs(*key); }; });
}

}  // namespace sbtrain
