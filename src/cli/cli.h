// The command line: one file for each subcommand, registered in app.cpp.
//
// A subcommand's file holds its options as a struct, the function that registers them, and the
// function that does the work:
//
//   struct EvalOptions { std::string checkpoint; ConfigOptions config; };
//
//   ExitCode run_eval(const EvalOptions& options) { ... return ExitCode::kDone; }
//
//   void add_eval(Command app, Action& action) {
//     auto options = std::make_shared<EvalOptions>();
//     Command command = app.add_subcommand("eval", "Loss and perplexity of a checkpoint");
//     command.add_option("--checkpoint", options->checkpoint, "...").required();
//     options->config.add(*command);
//     command.callback([options, &action] { action = [options] { return run_eval(*options); }; });
//   }
//
// Failures are thrown as Error; run_command_line turns them into a message and an exit code.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/options.h"
#include "core/error.h"
#include "train/run_config.h"

namespace sbtrain {

// The work of the chosen subcommand, done after the whole command line has been accepted.
using Action = std::function<ExitCode()>;

// The options that select a configuration, for every subcommand that works on one:
// `--config FILE`, and any key of it as `--train.lr=1e-3` or `--train.lr 1e-3`. Must outlive the
// parsing of the command line. Top-level keys (--seed, --name, ...) become options too, except
// those for which the subcommand has already registered an option of the same name.
struct ConfigOptions {
  std::string path;
  std::vector<std::string> overrides;  // "train.lr=1e-3", in the order given

  // `list_keys`: --help ends with the list of all configuration keys.
  void add(Command command, bool list_keys = false);

  // Defaults < file < environment < command line. Throws ExitCode::kConfig.
  Config load() const;
  // Like load(), but with a configuration text, such as the one saved in a run folder, in place of
  // the file `path`; messages call it `name`.
  Config load_on(const std::string& text, const std::string& name) const;
};

void add_train(Command app, Action& action);
void add_tokenizer(Command app, Action& action);
void add_prepare(Command app, Action& action);
void add_data(Command app, Action& action);
void add_data_tasks(Command group, Action& action);  // of `sbtrain data`
void add_ckpt(Command app, Action& action);
void add_generate(Command app, Action& action);
void add_eval(Command app, Action& action);
void add_export(Command app, Action& action);
void add_import(Command app, Action& action);
void add_config(Command app, Action& action);
void add_bench(Command app, Action& action);
void add_serve(Command app, Action& action);
void add_sweep(Command app, Action& action);
void add_quickstart(Command app, Action& action);
void add_doctor(Command app, Action& action);
void add_manual(Command app, Action& action);  // for the build; not listed

// Registers every subcommand.
void add_subcommands(Command app, Action& action);

// The work of main: parses `arguments` (without the program's name), runs, prints errors to stderr
// as "error: message", and returns the exit code. Throws nothing.
int run_command_line(const std::vector<std::string>& arguments) noexcept;

// `arguments` with --a.b=c and --a.b c written as --set=a.b=c, and with the default subcommand
// "train" in front when only options are given; likewise after "bench".
std::vector<std::string> normalize_arguments(const std::vector<std::string>& arguments);

}  // namespace sbtrain
