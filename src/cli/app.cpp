// The program as a whole: its subcommands, its errors and exit codes.
#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>

#include "cli/about.h"
#include "cli/cli.h"
#include "cli/failure.h"
#include "cli/ranks.h"
#include "config/keys.h"
#include "config/values.h"
#include "core/log.h"
#include "core/standard_streams.h"
#include "core/version.h"
#include "train/progress.h"
#include "train/signals.h"

namespace sbtrain {
namespace {

constexpr const char* kSummary =
    "sbtrain pretrains Llama-style language models whose attention can be swapped: stick-breaking\n"
    "attention, or softmax attention with or without rotary positions.";

constexpr const char* kFirstSteps = R"(
First steps:
  sbtrain quickstart                                    fetch text, train a small model, see it write
  sbtrain --config configs/tiny_sb.yaml                 train; options alone mean `sbtrain train`
  sbtrain --config configs/tiny_sb.yaml --train.lr=2e-3 any key of the file is an option as well
  sbtrain train --config configs/1b_sb.yaml --dry-run   parameters, memory and schedule; needs no GPU
  sbtrain doctor                                        what this machine can run, and what is missing

The files in configs/ come with the program and are found wherever it is installed.
`sbtrain COMMAND --help` explains a command, `sbtrain config docs` every configuration key.)";

// Those that --help lists.
std::vector<const CLI::App*> listed_commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* sub) { return !sub->get_group().empty(); });
}

bool starts_with_dash(const std::string& argument) {
  return argument.starts_with('-');
}

// Whether this is such as "--stages=[{name: a}]": a section of the configuration with a list or map
// for its value. `eval --data=FILE` is none.
bool sets_section(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos || equals + 1 == argument.size()) return false;
  if (argument[equals + 1] != '[' && argument[equals + 1] != '{') return false;
  using Kind = schema::Key::Kind;
  const schema::Key* key = schema::find_key(argument.substr(2, equals - 2));
  return key != nullptr && (key->kind == Kind::kSection || key->kind == Kind::kList);
}

// The key of "--train.lr", "--train.lr=1e-3" or "--stages=[...]"; empty for any other argument.
std::string dotted_key(const std::string& argument) {
  if (!argument.starts_with("--")) return "";
  if (sets_section(argument)) return argument.substr(2, argument.find('=') - 2);
  const std::string name = argument.substr(2, argument.find('=') - 2);
  const bool word = std::ranges::all_of(name, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '.' || c == '-';
  });
  return word && name.find('.') != std::string::npos ? name : "";
}

std::string command_list(const CLI::App& app) {
  std::string text;
  for (const CLI::App* command : listed_commands(app)) {
    text += fmt::format("  {:<10} {}\n", command->get_name(), command->get_description());
  }
  return text;
}

std::string introduction(const CLI::App& app) {
  return fmt::format("{}\n\nUsage: sbtrain COMMAND [OPTIONS]\n\nCommands:\n{}{}\n", kSummary,
                     command_list(app), kFirstSteps);
}

// The innermost subcommand that the command line has reached.
const CLI::App& reached(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  return *at;
}

std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name()
                           : fmt::format("{} {}", full_name(*parent), command.get_name());
}

std::string suggestion(const CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  if (starts_with_dash(word)) {
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  } else {
    for (const CLI::App* sub : listed_commands(command)) {
      names.push_back(sub->get_name());
    }
  }
  const std::string near = schema::nearest(word, names);
  if (!near.empty()) return fmt::format("; did you mean '{}'?", near);
  const bool takes_keys = command.get_option_no_throw("--set") != nullptr;
  if (!takes_keys || !word.starts_with("--")) return "";
  const schema::Key* key = schema::find_key_ending(word.substr(2));
  if (key == nullptr) return "";
  std::string name = schema::short_path(key->path);
  std::ranges::replace(name, '*', '0');  // the first item of a list
  if ("--" + name != word) return fmt::format("; did you mean '--{}'?", name);
  using Kind = schema::Key::Kind;
  if (key->kind != Kind::kSection && key->kind != Kind::kList) {
    return fmt::format("; did you mean '--set={}=...'?", name);
  }
  return fmt::format(
      "; it is a section: set one of its keys ('sbtrain config docs {}'), or all of "
      "them by a value in brackets, such as {}='[...]' or {}='{{...}}'",
      name, word, word);
}

[[noreturn]] void fail_usage(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = reached(app);
  const std::string name = full_name(command);
  std::string message = error.what();
  const std::vector<std::string> rest = app.remaining(true);
  if (!rest.empty()) {
    std::string word = rest.front();
    const bool dotted = word.starts_with("--set=");
    if (dotted) word = "--" + word.substr(6);
    word = word.substr(0, word.find('='));
    const char* kind = starts_with_dash(word)                     ? "option"
                       : command.get_subcommands(nullptr).empty() ? "argument"
                                                                  : "command";
    message = dotted ? fmt::format("'{}' takes no configuration keys such as {}", name, word)
                     : fmt::format("unknown {} {} of '{}'{}", kind, schema::in_quotes(word), name,
                                   suggestion(command, word));
  }
  fail(ExitCode::kUsage, "{}\nRun '{} --help' for what it accepts.", message, name);
}

// Makes empty values errors, such as that of --init-from "$BASE" where BASE is not set: they would
// mean the default, or name nothing. Texts and configuration keys may be empty.
void refuse_empty_values(CLI::App& command) {
  for (CLI::App* sub : command.get_subcommands([](CLI::App*) { return true; })) {
    refuse_empty_values(*sub);
  }
  const auto check = [](const std::string& value) {
    return std::string(value.empty() ? "the value is empty" : "");
  };
  for (CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    const std::string type = option->get_type_name();
    const bool may_be_empty =
        name == "--prompt" || name == "--text" || type == "VALUE" || type == "KEY=VALUE";
    if (option->get_items_expected_min() > 0 && !may_be_empty) option->check(check, "");
  }
}

// False if the user has asked for a text, which is then printed, and no work.
bool parse(CLI::App& app, std::vector<std::string> arguments) {
  std::ranges::reverse(arguments);  // the order in which CLI11 expects a vector
  try {
    app.parse(arguments);
  } catch (const CLI::Success& asked) {  // --help, --version
    if (prints_for_job()) app.exit(asked);
    return false;
  } catch (const CLI::ParseError& error) {
    fail_usage(app, error);
  }
  return true;
}

ExitCode run(const std::vector<std::string>& arguments) {
  CLI::App app(kSummary, "sbtrain");
  Action action;
  add_subcommands(Command(app), action);
  refuse_empty_values(app);
  if (arguments.empty()) {
    if (prints_for_job()) std::fputs(introduction(app).c_str(), stdout);
    return ExitCode::kDone;
  }
  app.set_version_flag("--version", version_text);
  app.footer(kFirstSteps);
  app.require_subcommand(1);
  std::vector<std::string> normalized = normalize_arguments(arguments);
  try {
    if (!parse(app, std::move(normalized))) return ExitCode::kDone;
  } catch (const Error&) {
    release_stop_signals();
    return static_cast<ExitCode>(fail_before_job(std::current_exception()));
  }
  require(action != nullptr, "the subcommand has no action");
  // main() holds the signals that ask for a stop. Training takes them when it is ready to save.
  const bool trains = app.got_subcommand("train") || app.got_subcommand("sweep") ||
                      app.got_subcommand("quickstart");
  if (!trains) release_stop_signals();
  return action();
}

// The result of a command is what it prints, so a command whose output was lost has failed.
int report_output(ExitCode code) {
  std::string reason;
  if (flush_output(reason)) return static_cast<int>(code);
  if (code != ExitCode::kDone) return static_cast<int>(code);
  return show_failure({ExitCode::kStorage, "cannot write to standard output: " + reason});
}

// After this call, a reader that has gone away or a file size limit makes a write fail; without it,
// a signal would end the process.
void ignore_write_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// A checkpoint is as many files as ranks wrote it, and all are open while it is read; the usual
// limit of 1024 is a soft one.
void raise_file_limit() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

int guarded_run(const std::vector<std::string>& arguments) {
  try {
    set_log_sink(make_progress_sink());
    ignore_write_signals();
    raise_file_limit();
    return report_output(run(arguments));
  } catch (...) {
    return show_failure(current_failure());
  }
}

}  // namespace

void add_subcommands(Command app, Action& action) {
  add_train(app, action);
  add_tokenizer(app, action);
  add_prepare(app, action);
  add_data(app, action);
  add_ckpt(app, action);
  add_generate(app, action);
  add_serve(app, action);
  add_eval(app, action);
  add_export(app, action);
  add_import(app, action);
  add_config(app, action);
  add_bench(app, action);
  add_sweep(app, action);
  add_quickstart(app, action);
  add_doctor(app, action);
  add_manual(app, action);
}

std::vector<std::string> normalize_arguments(const std::vector<std::string>& arguments) {
  std::vector<std::string> result;
  const std::vector<std::string> own = {"-h", "--help", "--version"};
  const auto options_alone = [&](size_t i) {
    return starts_with_dash(arguments[i]) && std::ranges::count(own, arguments[i]) == 0;
  };
  if (!arguments.empty() && options_alone(0)) result.emplace_back("train");
  const bool bench = !arguments.empty() && arguments.front() == "bench";
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (bench && i == 1 && options_alone(i)) result.emplace_back("train");
    const std::string& argument = arguments[i];
    if (argument == "--") {
      result.insert(result.end(), arguments.begin() + static_cast<ptrdiff_t>(i), arguments.end());
      break;
    }
    if (dotted_key(argument).empty()) {
      result.push_back(argument);
      // CLI11 accepts "--prompt ''" but not "--prompt=".
      if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
        result.back().pop_back();
        result.emplace_back();
      }
      continue;
    }
    result.push_back("--set=" + argument.substr(2));
    const bool has_value = argument.find('=') != std::string::npos;
    if (!has_value && i + 1 < arguments.size() && !arguments[i + 1].starts_with("--")) {
      result.back() += "=" + arguments[++i];
    }
  }
  if (bench && arguments.size() == 1) result.emplace_back("train");
  return result;
}

int run_command_line(const std::vector<std::string>& arguments) noexcept {
  try {
    return guarded_run(arguments);
  } catch (...) {  // no memory for the message
    write_error("error: out of memory\n");
    return static_cast<int>(ExitCode::kOutOfMemory);
  }
}

}  // namespace sbtrain
