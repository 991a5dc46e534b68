// sbtrain prepare: tokenises text, or checks and copies token ids, into a document store.
#include "data/prepare.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

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
  void show(const PrepareProgress& progress) {
    const double now = seconds();
    if (!progress.done && now - shown_ < (terminal_ ? 0.1 : 5.0)) return;
    shown_ = now;
    const double done = progress.done              ? 1.0
                        : progress.total_bytes > 0 ? static_cast<double>(progress.bytes) /
                                                         static_cast<double>(progress.total_bytes)
                                                   : 0.0;
    const double rate = static_cast<double>(progress.content_bytes) / 1e6 / std::max(now, 1e-3);
    std::string text = fmt::format("{} documents  {:.2f}M tokens  {:.1f} MB/s", progress.documents,
                                   static_cast<double>(progress.tokens) / 1e6, rate);
    // Nobody knows how long standard input is.
    if (progress.total_bytes > 0 || progress.done) {
      const double left = done > 0 ? now / done - now : 0;
      text = fmt::format("{:3.0f}%  {}  {:.0f} s left", 100 * std::min(done, 1.0), text,
                         std::max(left, 0.0));
    }
    if (terminal_) {
      const auto filled = static_cast<size_t>(24 * std::clamp(done, 0.0, 1.0));
      print_error("\r[{:-<24}] {}\x1b[K{}", std::string(filled, '#'), text,
                  progress.done ? "\n" : "");
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

// "3 .jsonl.gz, 1 .parquet"
std::string list_kinds(const std::map<std::string, int64_t>& kinds) {
  std::string list;
  for (const auto& [kind, count] : kinds) {
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", count,
                        kind.empty() ? "without extension" : kind);
  }
  return list;
}

void print_result(const std::string& path, const StoreInfo& info, double seconds) {
  std::string text;
  if (info.text_bytes > 0) {
    const auto bytes = static_cast<double>(info.text_bytes);
    text = fmt::format(", {:.2f} bytes per token, {:.1f} s, {:.1f} MB/s",
                       bytes / static_cast<double>(info.tokens), seconds, bytes / 1e6 / seconds);
  }
  fmt::print("{}: {} documents, {} tokens of {} pieces{}\n", path, info.documents, info.tokens,
             info.vocab, text);
}

// Tells the user about things that are not errors.
void print_warnings(const PrepareProgress& progress) {
  if (!progress.taken.empty()) {
    print_error("note: files taken from the folders: {}\n", list_kinds(progress.taken));
  }
  if (!progress.left_out.empty()) {
    int64_t files = 0;
    for (const auto& [kind, count] : progress.left_out) files += count;
    print_error("note: {} file(s) of the folders were left out: {}\n", files,
                list_kinds(progress.left_out));
  }
  if (progress.too_short > 0) {
    print_error("note: {} document(s) of too few tokens were left out\n", progress.too_short);
  }
  if (progress.bad_records > 0) {
    print_error("note: {} bad record(s) were left out{}:\n", progress.bad_records,
                progress.bad_records > static_cast<int64_t>(progress.first_bad.size())
                    ? fmt::format(", of which the first {} are", progress.first_bad.size())
                    : "");
    for (const std::string& record : progress.first_bad) print_error("  {}\n", record);
  }
  if (progress.forced_cuts > 0) {
    print_error(
        "note: text was cut in {} place(s) that lie within {} KiB without a newline or space, or "
        "that the tokenizer normalises; the tokens beside such a cut may differ from those of the "
        "whole text\n",
        progress.forced_cuts, Tokenizer::kChunkBytes >> 10);
  }
}

// The tokenizer; none for tokens without one.
std::optional<Tokenizer> load_tokenizer(const PrepareCommand& command) {
  std::optional<Tokenizer> tokenizer;
  if (command.tokenizer.empty()) return tokenizer;
  check_output(command.options.output, {&command.tokenizer, 1});
  if (command.options.split > 0) {
    check_output(validation_path(command.options.output), {&command.tokenizer, 1});
  }
  tokenizer.emplace(command.tokenizer, command.tokenizer_options);
  if (!tokenizer->lossless()) {
    print_error("warning: {} {}; decoding will not give the text back exactly\n", command.tokenizer,
                tokenizer->flaw());
  }
  return tokenizer;
}

ExitCode run_prepare(const PrepareCommand& command) {
  const std::string& output = command.options.output;
  const std::optional<Tokenizer> tokenizer = load_tokenizer(command);
  ProgressMeter meter;
  PrepareProgress last;
  interrupted = 0;
  // A signal that comes before the first report ends the process at once, for there are no files
  // yet.
  std::optional<InterruptScope> scope;
  try {
    const PreparedStores stores = prepare_documents(
        command.options, tokenizer ? &*tokenizer : nullptr, [&](const PrepareProgress& progress) {
          if (!scope) scope.emplace();
          last = progress;
          meter.show(progress);
          return interrupted == 0;
        });
    scope.reset();
    print_warnings(last);
    print_result(output, stores.store, meter.seconds());
    if (stores.validation) {
      print_result(validation_path(output), *stores.validation, meter.seconds());
    }
  } catch (const Interrupted&) {
    meter.end_line();
    print_error("interrupted: nothing was written\n");
    std::fflush(nullptr);
    scope.reset();
    std::raise(interrupted);  // tells the parent process why this one ended
    return ExitCode::kUsage;
  }
  return ExitCode::kDone;
}

// The options that say what the input is.
void add_input_options(Command command, PrepareOptions& options) {
  command
      .add_option("--input", options.inputs,
                  "Files, folders, or - for standard input: plain text (one document each), JSON "
                  "lines, Parquet, token ids of llm.c or nanoGPT; text also with .gz or .zst")
      .required();
  command.add_choice(
      "--format", options.input.format,
      "What the input is; auto: recognised by content and name, nanogpt always by this option");
  command
      .add_option("--key", options.input.keys.text,
                  "Key or column of the text in JSON lines and Parquet; a.b is b in the object a")
      .capture_default_str();
  command
      .add_option("--source-key", options.input.keys.source,
                  "Key or column of the source, which the statistics count by")
      .capture_default_str();
  command.add_flag("--skip-bad-records", options.skip_bad_records,
                   "Leave out lines of JSON that are no documents, instead of ending at the first; "
                   "how many, and where the first are, is said at the end");
  command
      .add_option("--eot", options.input.end_of_text,
                  "Id that separates the documents of token ids; default: llm.c's, else the "
                  "tokenizer's eos, else none")
      .check(whole_numbers(int64_t{0}, int64_t{INT32_MAX}));
  command
      .add_option("--vocab", options.vocab,
                  "Vocabulary of token ids that come without a --tokenizer; default: llm.c's")
      .check(whole_numbers(int64_t{1}, int64_t{INT32_MAX}));
}

}  // namespace

void add_prepare(Command app, Action& action) {
  Command command =
      app.add_subcommand("prepare", "Tokenise text into an HDF5 document store, on all cores");
  auto prepare = std::make_shared<PrepareCommand>();
  PrepareOptions& options = prepare->options;
  add_input_options(command, options);
  command.add_option("--tokenizer", prepare->tokenizer,
                     "sentencepiece model, tokenizer.json of a byte-level BPE, or tiktoken file; "
                     "only for token ids it may be left out");
  command.add_flag("--special-tokens", prepare->tokenizer_options.special,
                   "Special tokens that are written in the text, such as those of a chat template, "
                   "become their ids; otherwise they are text");
  command.add_option("--output", options.output, "HDF5 file to write").required();
  command
      .add_option("--split", options.split,
                  "Share of the documents that goes to OUTPUT's .validation sibling")
      .check(in_range(1e-9, 0.999));
  command
      .add_option(
          "--min-tokens", options.min_tokens,
          "Leave out documents of fewer tokens than this, such as 32768 for a store of long "
          "ones")
      .capture_default_str()
      .check(whole_numbers(int64_t{0}, int64_t{1} << 30));
  command.add_flag("--bos", options.bos, "Start each document with the tokenizer's bos");
  command.add_flag("!--no-eos", options.eos, "Do not end each document with its eos");
  command.add_option("--threads", options.threads, "Threads that encode; 0: one per core")
      .capture_default_str()
      .check(whole_numbers(0, 1024));
  command.callback([prepare, &action] { action = [prepare] { return run_prepare(*prepare); }; });
}

}  // namespace sbtrain
