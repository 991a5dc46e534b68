// sbtrain eval: loss and perplexity of a checkpoint on document stores, by rows, by length of the
// context or in sliding windows; answers to tasks in plain text; and the weights of its attention.
// This file has the options of the command, and calls the mode that they ask for.
#include <chrono>
#include <memory>

#include "cli/cli.h"
#include "cli/evaluation.h"
#include "core/device.h"
#include "train/progress.h"

namespace sbtrain {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 30;  // at once; positions have 32 bits

// Loading takes long for a large model.
constexpr std::chrono::minutes kLoading{60};

ExitCode evaluate_as(const EvalOptions& options, const Job& job) {
  job.control->progress("loading", kLoading);
  // One GPU measures attention while the others have nothing to do.
  if (options.attention.asked() && job.launch.rank > 0) return ExitCode::kDone;
  const Evaluation run(options, job);
  const HeldLog held;
  if (options.attention.asked()) {
    evaluate_attention(run);
  } else if (options.tasks.asked()) {
    evaluate_text_tasks(run);
  } else if (options.cache.asked()) {
    evaluate_cache(run);
  } else if (options.reach) {
    evaluate_reach(run);
  } else if (options.benefit > 0) {
    evaluate_benefit(run);
  } else if (!options.lengths.empty()) {
    evaluate_lengths(run);
  } else if (options.window > 0) {
    evaluate_sliding(run);
  } else if (run.config.data.task.active() && options.data.empty()) {
    evaluate_task(run);
  } else {
    evaluate_rows(run);
  }
  return ExitCode::kDone;
}

ExitCode run_eval(const EvalOptions& options) {
  return run_on_ranks({.prepare =
                           [&](const Launch&) {
                             options.check();
                             options.attention.check();
                             options.tasks.text_tasks.check(options.lengths);
                             return Deadlines{};
                           },
                       .ranks =
                           [&] {
                             if (options.attention.asked()) return 1;
                             return ranks_for_gpus(options.gpus, select_backend(options.device));
                           },
                       .work = [&](const Job& job) { return evaluate_as(options, job); }});
}

void add_windows(Command command, EvalOptions& options) {
  const Check positive = whole_numbers(int64_t{1}, kMostTokens);
  const char* by_length = "By length of the context";
  const char* sliding = "Sliding window";
  Option lengths =
      command
          .add_option("--lengths", options.lengths,
                      "Loss in windows of exactly these numbers of tokens, such as 512,1024,2048; "
                      "with --tasks: the lengths of prompt and answer")
          .delimiter(',')
          .check(positive)
          .group(by_length);
  options.tokens_per_length_option =
      command
          .add_option("--tokens-per-length", options.tokens_per_length,
                      "Tokens to evaluate for each length at most; at least one window")
          .check(positive)
          .capture_default_str()
          .group(by_length);
  options.bootstrap_option =
      command
          .add_option("--bootstrap", options.bootstrap,
                      "Draws of documents for the 95% intervals of losses; 0: no intervals")
          .check(whole_numbers(int64_t{0}, int64_t{1} << 20))
          .capture_default_str()
          .group(by_length);
  command
      .add_option("--same-targets", options.same_targets,
                  "Count this number of last targets of the longest length's windows, the same "
                  "ones for every length, so that only the context before them grows")
      .check(positive)
      .needs(lengths)
      .group(by_length);
  command
      .add_option("--position-bin", options.position_bin,
                  "Positions that share one mean loss in the JSON")
      .check(positive)
      .capture_default_str()
      .needs(lengths)
      .group(by_length);
  const char* benefit_group = "What the context is worth";
  Option benefit =
      command
          .add_option("--benefit", options.benefit,
                      "Loss with this number of tokens of context minus the loss with only the "
                      "last 64, 128, ... of them, on the same targets")
          .check(whole_numbers(kShortestContext, kMostTokens))
          .excludes(lengths)
          .group(benefit_group);
  command
      .add_option("--benefit-targets", options.benefit_targets,
                  "Last targets of each window that count")
      .check(positive)
      .capture_default_str()
      .needs(benefit)
      .group(benefit_group);
  Option reach =
      command
          .add_flag("--reach", options.reach,
                    "The share of the keys that each layer and head reads in windows of --lengths, "
                    "of a model that skips keys")
          .needs(lengths)
          .excludes(command.get_option("--recall"))
          .group("Attention");
  reach.excludes(command.get_option("--same-targets"));
  Option window =
      command
          .add_option("--window", options.window,
                      "Loss of whole documents in overlapping windows of this number of tokens")
          .check(positive)
          .excludes(lengths)
          .excludes(benefit)
          .excludes(command.get_option("--sequence-length"))
          .group(sliding);
  for (const char* other : {"--tokens", "--sequence-length"}) {
    lengths.excludes(command.get_option(other));
    benefit.excludes(command.get_option(other));
  }
  command
      .add_option("--stride", options.stride,
                  "Tokens between the starts of windows; 0: half a window")
      .check(whole_numbers(int64_t{0}, kMostTokens))
      .needs(window)
      .group(sliding);
}

}  // namespace

void add_eval(Command app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  Command command = app.add_subcommand("eval", "Loss and perplexity of a checkpoint");
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  command.add_option("--data", options->data,
                     "HDF5 document stores; default: the validation data of the run, or the "
                     "held-out examples of its task");
  command
      .add_option("--tokens", options->tokens,
                  "Tokens to evaluate at most, spread evenly over the data; 0: all")
      .check(whole_numbers(int64_t{0}, kAllTokens))
      .capture_default_str();
  command
      .add_option("--sequence-length", options->sequence_length,
                  "Tokens of context at most; 0: as in training")
      .check(whole_numbers(int64_t{0}, kMostTokens))
      .capture_default_str();
  command.add_flag("--ema", options->ema,
                   "Evaluate the average of the weights that the run keeps (train.ema)");
  command.add_flag("--recall", options->recall,
                   "Also split by whether the context holds the token or bigram already (AR)");
  options->rope.add(command);
  command.add_option("--tokenizer", options->tokenizer,
                     "Tokenizer of the training data, for bits per byte; default: the run's");
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  command
      .add_option("--gpus", options->gpus,
                  "GPUs of this machine that share the data; default: all. Not for ranks that a "
                  "launcher has started")
      .check(whole_numbers(1, 1024));
  options->json = command
                      .add_option("--json", options->json_file,
                                  "Print one JSON object, or write it to this file; -: print it")
                      .expected(0, 1);
  add_windows(command, *options);
  options->attention.add(command);
  options->tasks.add(command);
  options->cache.add(command);
  command.callback([options, &action] {
    if (options->json_file == "-") options->json_file.clear();
    action = [options] { return run_eval(*options); };
  });
}

}  // namespace sbtrain
