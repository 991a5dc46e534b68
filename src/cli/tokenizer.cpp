// sbtrain tokenizer train: trains a sentencepiece model or a byte-level BPE on text.
#include "tokenizer/tokenizer.h"

#include <chrono>
#include <memory>
#include <vector>

#include "cli/cli.h"
#include "core/files.h"
#include "text/text_input.h"

namespace sbtrain {
namespace {

struct TrainCommand {
  std::vector<std::string> inputs;
  std::string output;
  TokenizerTraining training;
  int64_t max_megabytes = 256;
};

ExitCode run_tokenizer_train(const TrainCommand& options) {
  const auto start = std::chrono::steady_clock::now();
  TextInput input(options.inputs);
  check_output(options.output, input.paths());
  for (const TextFile& file : input.files()) {
    if (!holds_tokens(file.format)) continue;
    fail(ExitCode::kUsage, "{}: it holds tokens, not text to train on", file.origin.name);
  }
  TokenizerTraining training = options.training;
  training.max_bytes = options.max_megabytes * 1000 * 1000;
  training.input = input.name();
  fmt::print("training a tokenizer of {} pieces on {:.1f} MB from {} files\n", training.vocab,
             static_cast<double>(input.total_bytes()) / 1e6, input.files().size());
  std::fflush(stdout);
  int64_t documents = 0;
  const NextText next = [&](std::string& text) {
    RawDocument raw;
    if (!input.next(raw)) return false;
    documents += raw.last ? 1 : 0;
    text = parse_document(std::move(raw)).text;
    return true;
  };
  train_tokenizer(next, training, options.output);
  const Tokenizer tokenizer(options.output);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{}: {} pieces from {} documents in {:.1f} s (sha256 {:.12})\n", options.output,
             tokenizer.size(), documents, seconds.count(), tokenizer.hash());
  return ExitCode::kDone;
}

}  // namespace

void add_tokenizer(Command app, Action& action) {
  Command group = app.add_subcommand("tokenizer", "Make a tokenizer");
  group.require_subcommand(1);
  Command command =
      group.add_subcommand("train", "Train a tokenizer that gives every text back exactly");
  auto options = std::make_shared<TrainCommand>();
  command
      .add_option("--input", options->inputs,
                  "Text, as for `sbtrain prepare`: files, folders, or - for standard input")
      .required();
  command.add_option("--output", options->output, "Model file to write").required();
  command.add_choice(
      "--type", options->training.type,
      "sentencepiece: its model, a BPE with byte fallback; bpe: the tokenizer.json of a "
      "byte-level BPE, as Llama 3 has");
  command.add_option("--vocab", options->training.vocab, "Pieces, the 256 bytes included")
      .capture_default_str()
      .check(whole_numbers(300, 1 << 24));
  command
      .add_option("--max-megabytes", options->max_megabytes,
                  "Megabytes of text to use at most; from more text, an even sample of lines")
      .capture_default_str()
      .check(whole_numbers(1, 100000));
  command.callback(
      [options, &action] { action = [options] { return run_tokenizer_train(*options); }; });
}

}  // namespace sbtrain
