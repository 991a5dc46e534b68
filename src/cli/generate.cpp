// sbtrain generate: continues a text with a checkpoint's model.
#include "serve/generate.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/cache_options.h"
#include "cli/cli.h"
#include "cli/rope_options.h"
#include "cli/run_tokenizer.h"
#include "config/stored_config.h"
#include "core/standard_streams.h"
#include "core/utf8.h"
#include "serve/inference.h"
#include "tokenizer/tokenizer.h"
#include "train/progress.h"

namespace sbtrain {
namespace {

struct GenerateOptions {
  std::string checkpoint;
  std::string tokenizer;
  std::string prompt;
  Option prompt_option{};
  DeviceChoice device = DeviceChoice::kAuto;
  SamplingOptions sampling;
  RopeOptions rope;
  KeyDropping dropping;
  bool json = false;
};

// Prompts of the interactive mode have up to this many tokens, for which memory is planned.
constexpr int64_t kLineTokens = 4096;
constexpr size_t kMaxPromptBytes = size_t{64} << 20;

// Prints text as soon as it is complete UTF-8, because a token may end inside a character.
class Printer {
 public:
  explicit Printer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // Returns false if nobody reads the text any more.
  bool add(int32_t token) {
    pending_ += tokenizer_.bytes(token);
    const size_t whole = complete_length(pending_);
    std::fwrite(pending_.data(), 1, whole, stdout);
    pending_.erase(0, whole);
    return std::fflush(stdout) == 0;
  }
  // Ends the text and its line. Returns as add() does.
  bool finish() {
    std::fwrite(pending_.data(), 1, pending_.size(), stdout);
    std::fputc('\n', stdout);
    return std::fflush(stdout) == 0;
  }

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

// Text of which a part could not be read is no prompt.
void check_standard_input() {
  if (std::ferror(stdin) == 0) return;
  fail(ExitCode::kData, "standard input: cannot read: {}", std::strerror(errno));
}

std::string read_standard_input() {
  std::string text;
  std::array<char, 1 << 16> buffer{};
  while (const size_t bytes = std::fread(buffer.data(), 1, buffer.size(), stdin)) {
    text.append(buffer.data(), bytes);
    if (text.size() > kMaxPromptBytes) {
      fail(ExitCode::kUsage, "the prompt on standard input has more than {} MiB",
           kMaxPromptBytes >> 20);
    }
  }
  check_standard_input();
  return text;
}

// A checkpoint's model with its tokenizer.
class Generator {
 public:
  explicit Generator(const GenerateOptions& options)
      : options_(options),
        checkpoint_(open_checkpoint(options.checkpoint)),
        config_(load_config()),
        text_(training_text(checkpoint_)),
        tokenizer_(load_tokenizer(checkpoint_, config_, text_, options.tokenizer)) {}

  ExitCode continue_prompt(const std::string& prompt) {
    const std::vector<int32_t> tokens = prompt_tokens(tokenizer_, text_, prompt);
    load_model(static_cast<int64_t>(tokens.size()));
    print(prompt, tokens);
    return ExitCode::kDone;
  }

  // Continues each line of standard input by itself, as continue_prompt would.
  ExitCode continue_lines() {
    const int64_t positions = config_.model.max_positions;
    const int64_t longest = positions > 0 ? positions - options_.sampling.max_tokens : kLineTokens;
    if (longest < 1) {
      fail(ExitCode::kUsage, "--max-tokens: {} of the model's {} positions leave none to a prompt",
           options_.sampling.max_tokens, positions);
    }
    load_model(longest);
    const bool terminal = ::isatty(STDIN_FILENO) == 1;
    if (terminal) print_error("Each line is continued by itself; an empty one: a new document.\n");
    while (true) {
      if (terminal) print_error("> ");
      std::string line;
      if (!std::getline(std::cin, line)) {
        if (terminal) print_error("\n");  // Ctrl-D ends no line
        break;
      }
      const std::vector<int32_t> tokens = prompt_tokens(tokenizer_, text_, line);
      if (static_cast<int64_t>(tokens.size()) > longest) {
        print_error("this line has {} tokens, but {} are possible at most\n", tokens.size(),
                    longest);
      } else if (!print(terminal ? "" : line, tokens)) {
        return ExitCode::kDone;
      }
    }
    check_standard_input();
    return ExitCode::kDone;
  }

 private:
  Config load_config() const {
    Config config = stored_config(checkpoint_);
    options_.rope.apply(config);
    return config;
  }

  void load_model(int64_t prompt_tokens) {
    const Backend backend = select_backend(options_.device);
    model_.emplace(config_.model, checkpoint_, backend,
                   plan_generation(config_.model, backend, prompt_tokens,
                                   options_.sampling.max_tokens, options_.dropping));
  }

  // Prints `prompt` and its continuation. Returns false if nobody reads it any more.
  bool print(const std::string& prompt, const std::vector<int32_t>& tokens) {
    const HeldLog held;
    Printer printer(tokenizer_);
    if (!options_.json) std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    SamplingOptions sampling = options_.sampling;
    sampling.vocab = tokenizer_.size();
    CacheUse use;
    const auto start = std::chrono::steady_clock::now();
    const std::vector<int32_t> generated = generate(
        model_->model(), model_->params(), model_->stream(), tokens, sampling, tokenizer_.eos(),
        [&](int32_t token) { return options_.json || printer.add(token); }, options_.dropping,
        &use);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options_.json) return print_json(prompt, tokens, generated, seconds, use);
    const bool read = printer.finish();
    print_error("[{} tokens, {:.0f} tokens/s{}]\n", generated.size(),
                static_cast<double>(generated.size()) / seconds,
                use.seen > 0 ? ", " + cache_text(use) : "");
    return read;
  }

  bool print_json(const std::string& prompt, const std::vector<int32_t>& tokens,
                  const std::vector<int32_t>& generated, double seconds,
                  const CacheUse& use) const {
    nlohmann::ordered_json json = {
        {"prompt", prompt},
        {"text", tokenizer_.decode(generated)},
        {"prompt_tokens", tokens.size()},
        {"tokens", generated.size()},
        {"seconds", seconds},
        {"tokens_per_second", static_cast<double>(generated.size()) / seconds}};
    if (use.seen > 0) {
      json["cache"] = {{"drop_below", options_.dropping.below},
                       {"share_kept", use.share_kept()},
                       {"bytes", use.bytes},
                       {"most_bytes", use.most_bytes}};
    }
    // What is no UTF-8 becomes U+FFFD.
    fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    return std::fflush(stdout) == 0;
  }

  const GenerateOptions& options_;
  CheckpointReader checkpoint_;
  Config config_;
  TrainingText text_;
  Tokenizer tokenizer_;
  std::optional<InferenceModel> model_;
};

ExitCode run_generate(const GenerateOptions& options) {
  Generator generator(options);
  if (!options.prompt_option.given()) return generator.continue_lines();
  return generator.continue_prompt(options.prompt == "-" ? read_standard_input() : options.prompt);
}

}  // namespace

void add_generate(Command app, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  Command command = app.add_subcommand("generate", "Continue a text with a trained model");
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  options->prompt_option = command.add_option(
      "--prompt", options->prompt,
      "Text to continue; empty: a new document; -: standard input; without this option, each line "
      "of standard input is continued by itself");
  command.add_option("--tokenizer", options->tokenizer,
                     "Tokenizer of the training data; default: the run's");
  options->rope.add(command);
  SamplingOptions& sampling = options->sampling;
  command.add_option("--max-tokens", sampling.max_tokens, "Tokens to generate at most")
      .check(whole_numbers(int64_t{1}, int64_t{1} << 30))
      .capture_default_str();
  command.add_option("--temperature", sampling.temperature, "0: always the likeliest token")
      .check(in_range(0.0, 100.0))
      .capture_default_str();
  command.add_option("--top-k", sampling.top_k, "Draw from the k likeliest tokens; 0: all")
      .check(non_negative())
      .capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "Draw from the likeliest tokens that together reach this probability")
      .check(in_range(0.0, 1.0))
      .capture_default_str();
  command.add_option("--seed", sampling.seed, "Same seed, same text").capture_default_str();
  add_cache_options(command, options->dropping);
  command.add_flag("--json", options->json,
                   "Print one JSON object for each prompt, when it has been continued");
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  command.callback([options, &action] { action = [options] { return run_generate(*options); }; });
}

}  // namespace sbtrain
