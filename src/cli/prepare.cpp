// sbtrain prepare: tokenises text into a document store.
#include "data/prepare.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>

#include "cli/cli.h"
#include "core/files.h"
#include "core/standard_streams.h"

namespace sbtrain {
namespace {

struct PrepareCommand {
  PrepareOptions options;
  std::string tokenizer;
  TokenizerOptions tokenizer_options;
};

volatile std::sig_atomic_t interrupted = 0;

// While it exists, SIGINT and SIGTERM are only recorded, so that files can be cleaned up first.
class InterruptScope {
 public:
  InterruptScope() {
    struct sigaction note {};
    note.sa_handler = [](int signal) { interrupted = signal; };
    ::sigaction(SIGINT, &note, &old_int_);
    ::sigaction(SIGTERM, &note, &old_term_);
  }
  ~InterruptScope() {
    ::sigaction(SIGINT, &old_int_, nullptr);
    ::sigaction(SIGTERM, &old_term_, nullptr);
  }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  struct sigaction old_int_ {};
  struct sigaction old_term_ {};
};

// Draws a bar in place on a terminal, and prints a line every few seconds elsewhere.
class ProgressMeter {
 public:
  void show(const PrepareProgress& progress, bool last) {
    const double now = seconds();
    if (!last && now - shown_ < (terminal_ ? 0.1 : 5.0)) return;
    shown_ = now;
    const double done = progress.total_bytes > 0 ? static_cast<double>(progress.bytes) /
                                                       static_cast<double>(progress.total_bytes)
                                                 : 1.0;
    const double rate = static_cast<double>(progress.bytes) / 1e6 / std::max(now, 1e-3);
    const double left = done > 0 ? now / done - now : 0;
    const std::string text =
        fmt::format("{:3.0f}%  {} documents  {:.2f}M tokens  {:.1f} MB/s  {:.0f} s left",
                    100 * std::min(done, 1.0), progress.documents,
                    static_cast<double>(progress.tokens) / 1e6, rate, std::max(left, 0.0));
    if (terminal_) {
      const auto filled = static_cast<size_t>(24 * std::clamp(done, 0.0, 1.0));
      print_error("\r[{:-<24}] {}\x1b[K{}", std::string(filled, '#'), text, last ? "\n" : "");
    } else {
      print_error("{}\n", text);
    }
  }
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  // Ends the bar's line, so that other text starts on a new one.
  void end_line() const {
    if (terminal_ && shown_ > 0) print_error("\n");
  }

 private:
  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double shown_ = 0;
};

// Tells the user about things that are not errors.
void print_warnings(const PrepareProgress& progress) {
  if (!progress.left_out.empty()) {
    std::string kinds;
    int64_t files = 0;
    for (const auto& [extension, count] : progress.left_out) {
      files += count;
      kinds += fmt::format("{}{} {}", kinds.empty() ? "" : ", ", count,
                           extension.empty() ? "without extension" : extension);
    }
    print_error("note: {} file(s) of the folders were left out for their extensions: {}\n", files,
                kinds);
  }
  if (progress.forced_cuts > 0) {
    print_error(
        "note: text was cut in {} place(s) that lie within {} KiB without a newline or space, or "
        "that the tokenizer normalises; the tokens beside such a cut may differ from those of the "
        "whole text\n",
        progress.forced_cuts, Tokenizer::kPartBytes >> 10);
  }
}

ExitCode run_prepare(const PrepareCommand& command) {
  const std::string tokenizer_path = command.tokenizer;
  check_output(command.options.output, {&tokenizer_path, 1});
  const Tokenizer tokenizer(tokenizer_path, command.tokenizer_options);
  if (!tokenizer.lossless()) {
    print_error("warning: {} {}; decoding will not give the text back exactly\n", tokenizer_path,
                tokenizer.flaw());
  }
  ProgressMeter meter;
  PrepareProgress last;
  interrupted = 0;
  try {
    const InterruptScope scope;
    const StoreInfo info = prepare_documents(command.options, tokenizer, [&](const auto& progress) {
      last = progress;
      meter.show(progress, progress.bytes >= progress.total_bytes);
      return interrupted == 0;
    });
    print_warnings(last);
    fmt::print("{}: {} documents, {} tokens of {} pieces, {:.2f} bytes per token, {:.1f} s\n",
               command.options.output, info.documents, info.tokens, info.vocab,
               static_cast<double>(info.text_bytes) / static_cast<double>(info.tokens),
               meter.seconds());
  } catch (const Interrupted&) {
    meter.end_line();
    print_error("interrupted: nothing was written\n");
    std::fflush(nullptr);
    std::raise(interrupted);  // tells the parent process why this one ended
    return ExitCode::kUsage;
  }
  return ExitCode::kDone;
}

}  // namespace

void add_prepare(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("prepare", "Tokenise text into an HDF5 document store, on all cores");
  auto prepare = std::make_shared<PrepareCommand>();
  PrepareOptions& options = prepare->options;
  command
      ->add_option("--input", options.inputs,
                   "Text: .jsonl files with a \"text\" (and perhaps a \"source\") on each line, "
                   "plain text files of one document each, or folders of them")
      ->required();
  command
      ->add_option("--tokenizer", prepare->tokenizer,
                   "sentencepiece model, tokenizer.json of a byte-level BPE, or tiktoken file")
      ->required();
  command->add_flag(
      "--special-tokens", prepare->tokenizer_options.special,
      "Special tokens that are written in the text, such as those of a chat template, "
      "become their ids; otherwise they are text");
  command->add_option("--output", options.output, "HDF5 file to write")->required();
  command->add_flag("--bos", options.bos, "Start each document with the tokenizer's bos");
  command->add_flag("!--no-eos", options.eos, "Do not end each document with its eos");
  command->add_option("--threads", options.threads, "Threads that encode; 0: one per core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  command->callback([prepare, &action] { action = [prepare] { return run_prepare(*prepare); }; });
}

}  // namespace sbtrain
