// sbtrain generate: continues a text with a checkpoint's model.
#include "serve/generate.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/choice_option.h"
#include "cli/cli.h"
#include "cli/range.h"
#include "cli/rope_options.h"
#include "cli/run_tokenizer.h"
#include "config/schema.h"
#include "core/standard_streams.h"
#include "data/tokenizer.h"
#include "serve/inference.h"

namespace sbtrain {
namespace {

struct GenerateOptions {
  std::string checkpoint;
  std::string tokenizer;
  std::string prompt;
  DeviceChoice device = DeviceChoice::kAuto;
  SamplingOptions sampling;
  RopeOptions rope;
};

// Prints text as soon as it is complete UTF-8, because a token may end inside a character.
class Printer {
 public:
  explicit Printer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // Returns false if nobody reads the text any more.
  bool add(int32_t token) {
    pending_ += tokenizer_.bytes(token);
    const size_t whole = complete(pending_);
    std::fwrite(pending_.data(), 1, whole, stdout);
    pending_.erase(0, whole);
    return std::fflush(stdout) == 0;
  }
  void finish() {
    std::fwrite(pending_.data(), 1, pending_.size(), stdout);
    std::fputc('\n', stdout);
  }

 private:
  // Number of bytes up to the last complete UTF-8 character; all bytes if the end is not UTF-8.
  static size_t complete(const std::string& text) {
    for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
      const auto byte = static_cast<unsigned char>(text[text.size() - back]);
      if ((byte & 0xC0) == 0x80) continue;
      const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
      return length > back ? text.size() - back : text.size();
    }
    return text.size();
  }
  const Tokenizer& tokenizer_;
  std::string pending_;
};

ExitCode run_generate(const GenerateOptions& options) {
  const CheckpointReader checkpoint = open_checkpoint(options.checkpoint);
  Config config =
      parse_config(checkpoint.config_yaml(), checkpoint.folder().string() + "/config.yaml");
  options.rope.apply(config);
  const std::string path = run_tokenizer(checkpoint, config, options.tokenizer);
  if (path.empty()) {
    fail(ExitCode::kUsage, "the run's configuration names no tokenizer; give one with --tokenizer");
  }
  const Tokenizer tokenizer(path);
  const TrainingText text = training_text(checkpoint);
  check_tokenizer(tokenizer, text);
  if (tokenizer.size() > config.model.vocab) {
    fail(ExitCode::kConfig, "{} has {} pieces, the model's vocabulary {}: another tokenizer?", path,
         tokenizer.size(), config.model.vocab);
  }
  const std::vector<int32_t> prompt = prompt_tokens(tokenizer, text, options.prompt);
  const Backend backend = select_backend(options.device);
  InferenceModel model(config.model, checkpoint, backend,
                       plan_generation(config.model, backend, static_cast<int64_t>(prompt.size()),
                                       options.sampling.max_tokens));

  std::fwrite(options.prompt.data(), 1, options.prompt.size(), stdout);
  Printer printer(tokenizer);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int32_t> tokens =
      generate(model.model(), model.params(), model.stream(), prompt, options.sampling,
               tokenizer.eos(), [&](int32_t token) { return printer.add(token); });
  printer.finish();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_error("[{} tokens, {:.0f} tokens/s]\n", tokens.size(),
              static_cast<double>(tokens.size()) / seconds);
  return ExitCode::kDone;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  command->add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint")->required();
  command->add_option("--prompt", options->prompt, "Text to continue; empty: a new document");
  command->add_option("--tokenizer", options->tokenizer,
                      "sentencepiece model of the training data; default: the run's");
  options->rope.add(*command);
  SamplingOptions& sampling = options->sampling;
  command->add_option("--max-tokens", sampling.max_tokens, "Tokens to generate at most")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0: always the likeliest token")
      ->check(in_range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "Draw from the k likeliest tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--top-p", sampling.top_p,
                   "Draw from the likeliest tokens that together reach this probability")
      ->check(in_range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", sampling.seed, "Same seed, same text")->capture_default_str();
  add_choice(*command, "--device", options->device, "auto, cpu or cuda");
  command->callback([options, &action] { action = [options] { return run_generate(*options); }; });
}

}  // namespace sbtrain
