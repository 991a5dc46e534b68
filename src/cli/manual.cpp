// sbtrain manual: the man page and the completions of shells, made from the commands' own options
// and the schema of the configuration. The build calls it; people read what is installed.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "cli/cli.h"
#include "config/keys.h"
#include "core/version.h"

namespace sbtrain {
namespace {

// A command as the three documents need it.
struct ManualCommand {
  std::string name;  // "bench train"; empty: the program itself
  std::string description;
  bool takes_keys = false;
  std::vector<const CLI::Option*> options{};
  std::vector<std::string> subcommands{};
};

bool is_visible(const CLI::App* command) {
  return !command->get_group().empty();
}

void collect(const CLI::App& app, const std::string& name, std::vector<ManualCommand>& commands) {
  ManualCommand command{.name = name, .description = app.get_description()};
  command.takes_keys = app.get_option_no_throw("--set") != nullptr;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) command.options.push_back(option);
  }
  const auto below = app.get_subcommands(is_visible);
  for (const CLI::App* sub : below) command.subcommands.push_back(sub->get_name());
  commands.push_back(std::move(command));
  for (const CLI::App* sub : below) {
    collect(*sub, name.empty() ? sub->get_name() : name + " " + sub->get_name(), commands);
  }
}

const CLI::App& root_of(const CLI::App& app) {
  return app.get_parent() == nullptr ? app : root_of(*app.get_parent());
}

// "--micro-batch" of an option; empty for an argument without dashes.
std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? "" : "--" + option.get_lnames().front();
}

std::vector<std::string> key_options() {
  std::vector<std::string> names;
  for (const schema::Key& key : schema::all_keys()) {
    if (key.kind == schema::Key::Kind::kSection || key.path.find('*') != std::string::npos)
      continue;
    if (key.path.find('.') == std::string::npos) continue;  // an option of its own
    names.push_back("--" + key.path + "=");
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// What can follow a command: its subcommands, options and keys.
std::vector<std::string> words_of(const ManualCommand& command) {
  std::vector<std::string> words = command.subcommands;
  for (const CLI::Option* option : command.options) {
    if (const std::string name = long_name(*option); !name.empty()) words.push_back(name);
  }
  if (command.takes_keys) {
    const std::vector<std::string> keys = key_options();
    words.insert(words.end(), keys.begin(), keys.end());
  }
  return words;
}

// The words after the program's name: its commands, and the options of train, which is the default.
std::vector<std::string> first_words(const std::vector<ManualCommand>& commands) {
  std::vector<std::string> words = words_of(commands.front());
  for (const ManualCommand& command : commands) {
    if (command.name != "train") continue;
    for (const std::string& word : words_of(command)) {
      if (std::ranges::find(words, word) == words.end()) words.push_back(word);
    }
  }
  return words;
}

// "'bench train'|'bench ops'": the commands that a shell's `case` accepts.
std::string case_of_commands(const std::vector<ManualCommand>& commands) {
  std::vector<std::string> names;
  for (const ManualCommand& command : commands) {
    if (!command.name.empty()) names.push_back("'" + command.name + "'");
  }
  return fmt::format("{}", fmt::join(names, "|"));
}

std::string cases_of_words(const std::vector<ManualCommand>& commands) {
  std::string text;
  for (const ManualCommand& command : commands) {
    const auto words = command.name.empty() ? first_words(commands) : words_of(command);
    text += fmt::format("    '{}') known='{}' ;;\n", command.name, fmt::join(words, " "));
  }
  return text;
}

std::string bash_completion(const std::vector<ManualCommand>& commands) {
  return fmt::format(R"(# Completion of sbtrain for bash: commands, options and configuration keys.
_sbtrain() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= known= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "${{command:+$command }}$word" in
    {}) command="${{command:+$command }}$word" ;;
    esac
  done
  case "$command" in
{}  esac
  COMPREPLY=($(compgen -W "$known" -- "$current"))
  case "${{COMPREPLY[0]-}}" in
  *=) compopt -o nospace ;;
  esac
}}
complete -o default -F _sbtrain sbtrain
)",
                     case_of_commands(commands), cases_of_words(commands));
}

std::string zsh_completion(const std::vector<ManualCommand>& commands) {
  return fmt::format(R"(#compdef sbtrain
# Completion of sbtrain for zsh: commands, options and configuration keys.
_sbtrain() {{
  local command= known= word
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "${{command:+$command }}$word" in
    {}) command="${{command:+$command }}$word" ;;
    esac
  done
  case "$command" in
{}  esac
  local -a plain keys
  plain=(${{${{(z)known}}:#*=}})
  keys=(${{(M)${{(z)known}}:#*=}})
  compadd -- $plain
  compadd -S '' -- $keys
  _files
}}
_sbtrain "$@"
)",
                     case_of_commands(commands), cases_of_words(commands));
}

// ---- the man page -------------------------------------------------------------------------------

// Text as roff prints it literally.
std::string roff(std::string_view text) {
  std::string result;
  bool line_start = true;
  for (const char c : text) {
    if (line_start && (c == '.' || c == '\'')) result += "\\&";
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else {
      result += c;
    }
    line_start = c == '\n';
  }
  return result;
}

std::string tagged(const std::string& tag, const std::string& text) {
  return fmt::format(".TP\n.B {}\n{}\n", tag, roff(text));
}

std::string option_tag(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  if (names.empty()) names.push_back(option.get_name());
  std::string tag = roff(fmt::format("{}", fmt::join(names, ", ")));
  if (option.get_items_expected_max() > 0 && !option.get_type_name().empty()) {
    tag += " " + roff(option.get_type_name());
  }
  return tag;
}

std::string option_text(const CLI::Option& option) {
  std::string text = option.get_description();
  if (!option.get_default_str().empty()) {
    text += fmt::format(" (default: {})", option.get_default_str());
  }
  return option.get_required() ? text + " (required)" : text;
}

std::string key_text(const schema::Key& key) {
  std::vector<std::string> facts = {key.type};
  if (!key.choices.empty()) facts.push_back(fmt::format("one of {}", fmt::join(key.choices, ", ")));
  if (!key.range.empty()) facts.push_back(key.range);
  if (!key.condition.empty()) facts.push_back("only with " + key.condition);
  if (!key.default_value.empty()) facts.push_back("default: " + key.default_value);
  return fmt::format("{} ({})", key.help, fmt::join(facts, "; "));
}

constexpr const char* kAround = R"(.SH CONFIGURATION
A configuration is a YAML file, which may include others. A key may also be set by an option such as
.BR \-\-train.lr=1e\-3 ,
which has precedence over the environment, as in
.BR SBTRAIN_TRAIN__LR=1e\-3 ,
which has precedence over the file. In the names below an asterisk stands for the index of an item.
)";

constexpr const char* kEnd = R"(.SH EXIT STATUS
.TP
.B 0
done
.TP
.B 1
an internal error
.TP
.B 2
an error on the command line
.TP
.B 3
an error in the configuration, or a run, tokenizer or data that does not match it
.TP
.B 4
data that is missing, damaged or of another format
.TP
.B 5
no usable checkpoint
.TP
.B 6
too many steps in a row without finite losses and gradients
.TP
.B 7
communication between ranks failed
.TP
.B 8
too little memory, or no thread could be started
.TP
.B 9
output could not be written
.TP
.B 85
the run was asked to stop and has saved; the same command continues it
.SH SIGNALS
SIGTERM, SIGINT and SIGUSR1 make a training run save and end with exit status 85; SIGUSR2 makes it
save and continue.
)";

std::string man_page(const std::vector<ManualCommand>& commands) {
  std::string text = fmt::format(
      ".TH SBTRAIN 1 \"\" \"sbtrain {}\" \"User Commands\"\n.SH NAME\nsbtrain \\- pretrain "
      "language "
      "models whose attention can be swapped\n.SH SYNOPSIS\n.B sbtrain\n.I "
      "COMMAND\n[\\fIOPTIONS\\fR]"
      "\n.SH DESCRIPTION\n{}\n.SH COMMANDS\n",
      version(), roff(commands.front().description));
  for (const ManualCommand& command : commands) {
    if (command.name.empty()) continue;
    text += fmt::format(".SS sbtrain {}\n{}\n", roff(command.name), roff(command.description));
    for (const CLI::Option* option : command.options) {
      text += tagged(option_tag(*option), option_text(*option));
    }
  }
  text += kAround;
  for (const schema::Key& key : schema::all_keys()) {
    if (key.kind == schema::Key::Kind::kScalar || key.kind == schema::Key::Kind::kTexts) {
      text += tagged(roff(key.path), key_text(key));
    }
  }
  return text + kEnd;
}

}  // namespace

void add_manual(Command app, Action& action) {
  auto kind = std::make_shared<std::string>();
  const Command command =
      app.add_subcommand("manual", "Print the man page, or the completion of a shell");
  command.hide();
  command.add_option("KIND", *kind, "man, bash or zsh")
      .required()
      .check(one_of_words({"man", "bash", "zsh"}));
  command.callback([kind, command, &action] {
    action = [kind, command] {
      std::vector<ManualCommand> commands;
      collect(root_of(command.app()), "", commands);
      const std::string text = *kind == "man"    ? man_page(commands)
                               : *kind == "bash" ? bash_completion(commands)
                                                 : zsh_completion(commands);
      std::fputs(text.c_str(), stdout);
      return ExitCode::kDone;
    };
  });
}

}  // namespace sbtrain
