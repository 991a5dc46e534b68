// sbtrain eval: loss and perplexity of a checkpoint on a document store.
#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/cli.h"
#include "cli/rope_options.h"
#include "config/schema.h"
#include "eval/perplexity.h"
#include "eval/task_accuracy.h"
#include "serve/inference.h"
#include "train/bits.h"

namespace sbtrain {
namespace {

struct EvalOptions {
  std::string checkpoint;
  std::vector<std::string> data;
  std::string tokenizer;
  std::string device = "auto";
  int64_t tokens = 0;
  int64_t sequence_length = 0;
  RopeOptions rope;
  bool json = false;
};

void print_result(const EvalOptions& options, int64_t step, int64_t length,
                  const Perplexity& result, double seconds) {
  const double bits = bits_per_byte(result.loss(), result.tokens, result.bytes);
  if (options.json) {
    nlohmann::json json = {{"checkpoint", options.checkpoint},
                           {"step", step},
                           {"sequence_length", length},
                           {"tokens", result.tokens},
                           {"loss", result.loss()},
                           {"perplexity", perplexity(result.loss())}};
    if (result.bytes > 0) json["bits_per_byte"] = bits;
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("step {}, {} tokens predicted in sequences of {}, {:.1f} s\n", step, result.tokens,
             length, seconds);
  fmt::print("  loss           {:.4f} nats per token\n", result.loss());
  fmt::print("  perplexity     {:.2f}\n", perplexity(result.loss()));
  if (result.bytes > 0) fmt::print("  bits per byte  {:.4f}\n", bits);
}

void print_task(const EvalOptions& options, int64_t step, int64_t length, const Task& task,
                const TaskAccuracy& result) {
  if (options.json) {
    const nlohmann::json json = {{"checkpoint", options.checkpoint},
                                 {"step", step},
                                 {"sequence_length", length},
                                 {"task", task.config().type},
                                 {"pairs", task.config().pairs},
                                 {"labels", result.labels},
                                 {"loss", result.loss()},
                                 {"accuracy", result.accuracy()}};
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("step {}, {} labels of {} held-out examples of {} with {} pairs in {} tokens\n", step,
             result.labels, task.config().eval_examples, task.config().type, task.config().pairs,
             length);
  fmt::print("  loss           {:.4f} nats per label\n", result.loss());
  fmt::print("  accuracy       {:.4f}\n", result.accuracy());
}

ExitCode evaluate_task(const EvalOptions& options, const Config& config,
                       const CheckpointReader& checkpoint, int64_t length, int64_t micro_batch) {
  const Task task(config.data.task, config.model.vocab, length, config.seed);
  InferenceModel model(config.model, checkpoint, select_backend(options.device));
  const TaskAccuracy result = task_accuracy(
      task, micro_batch, [&](const PackedBatch& batch) { return model.score(batch, length); });
  print_task(options, checkpoint.manifest().step, length, task, result);
  return ExitCode::kDone;
}

ExitCode run_eval(const EvalOptions& options) {
  const CheckpointReader checkpoint = open_checkpoint(options.checkpoint);
  Config config =
      parse_config(checkpoint.config_yaml(), checkpoint.folder().string() + "/config.yaml");
  options.rope.apply(config);
  const int64_t length =
      options.sequence_length > 0 ? options.sequence_length : config.train.sequence_length;
  // As many tokens at once as in training.
  const int64_t at_once = config.train.micro_batch * config.train.sequence_length;
  if (config.data.task.active() && options.data.empty()) {
    return evaluate_task(options, config, checkpoint, length,
                         std::max<int64_t>(1, at_once / length));
  }
  const HeldOut held_out(
      {.paths = options.data.empty() ? config.data.validation : options.data,
       .tokenizer = options.tokenizer.empty() ? config.data.tokenizer : options.tokenizer,
       .vocab = config.model.vocab,
       .sequence_length = length,
       .micro_batch = std::max<int64_t>(1, at_once / length),
       .max_tokens = options.tokens > 0 ? options.tokens : int64_t{1} << 60,
       .predict_across_documents = config.data.predict_across_documents});
  if (held_out.empty()) {
    fail(ExitCode::kUsage, "the run's configuration names no validation data: give it by --data");
  }
  InferenceModel model(config.model, checkpoint, select_backend(options.device));
  const auto start = std::chrono::steady_clock::now();
  const Perplexity result =
      held_out.evaluate([&](const PackedBatch& batch) { return model.loss_sum(batch, length); });
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_result(options, checkpoint.manifest().step, length, result, seconds);
  return ExitCode::kDone;
}

}  // namespace

void add_eval(CLI::App& app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand("eval", "Loss and perplexity of a checkpoint");
  command->add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint")->required();
  command->add_option("--data", options->data,
                      "HDF5 document stores; default: the validation data of the run, or the "
                      "held-out examples of its task");
  command
      ->add_option("--tokens", options->tokens,
                   "Tokens to evaluate at most, spread evenly over the data; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--sequence-length", options->sequence_length,
                   "Tokens of context at most; 0: as in training")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  options->rope.add(*command);
  command->add_option("--tokenizer", options->tokenizer,
                      "sentencepiece model, for bits per byte; default: the run's");
  command->add_option("--device", options->device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &action] { action = [options] { return run_eval(*options); }; });
}

}  // namespace sbtrain
