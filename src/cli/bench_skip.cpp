#include "cli/bench_skip.h"

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/skipping.h"
#include "cli/backend.h"
#include "cli/options.h"
#include "cli/run_tokenizer.h"
#include "config/stored_config.h"

namespace sbtrain {
namespace {

struct BenchSkipCommand {
  std::string checkpoint;
  std::vector<std::string> data;
  SkippingBenchOptions bench{.lengths = {}, .epsilons = {0x1p-24, 1e-4, 1e-2, 1e-1}};
  DeviceChoice device = DeviceChoice::kAuto;
  bool json = false;
};

nlohmann::ordered_json number_or_null(double x) {
  return std::isnan(x) ? nlohmann::ordered_json() : nlohmann::ordered_json(x);
}

void print_json(const std::string& name, const SkippingBenchRow& row) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const double share : row.keys_read_by_layer) layers.push_back(number_or_null(share));
  const nlohmann::ordered_json json = {{"name", name},
                                       {"length", row.length},
                                       {"epsilon", row.epsilon},
                                       {"windows", row.windows},
                                       {"batch_tokens", row.batch_tokens},
                                       {"keys_read", number_or_null(row.keys_read)},
                                       {"keys_read_by_layer", std::move(layers)},
                                       {"loss", row.loss},
                                       {"attention_forward_seconds", row.attention_forward},
                                       {"attention_backward_seconds", row.attention_backward},
                                       {"model_forward_seconds", row.model_forward},
                                       {"model_training_seconds", row.model_training}};
  fmt::print("{}\n", json.dump());
}

void print_table(const std::vector<SkippingBenchRow>& rows) {
  fmt::print("{:>8}{:>11}{:>8}{:>11}{:>22}{:>23}{:>18}{:>13}{:>11}\n", "length", "epsilon",
             "tokens", "keys read", "attention forward ms", "attention backward ms",
             "model forward ms", "training ms", "loss");
  double loss = 0;  // without skipping
  for (const SkippingBenchRow& row : rows) {
    if (row.epsilon == 0) loss = row.loss;
    const std::string read =
        std::isnan(row.keys_read) ? "" : fmt::format("{:.1f}%", 100 * row.keys_read);
    fmt::print("{:>8}{:>11.3g}{:>8}{:>11}{:>22.3f}{:>23.3f}{:>18.3f}{:>13.3f}", row.length,
               row.epsilon, row.batch_tokens, read, 1e3 * row.attention_forward,
               1e3 * row.attention_backward, 1e3 * row.model_forward, 1e3 * row.model_training);
    if (row.epsilon == 0) {
      fmt::print("{:>11.4f}\n", row.loss);
    } else {
      fmt::print("{:>+11.4f}\n", row.loss - loss);
    }
  }
}

ExitCode run_bench_skip(const BenchSkipCommand& options) {
  const CheckpointReader checkpoint = open_checkpoint(options.checkpoint);
  const Config config = stored_config(checkpoint);
  const HeldOutOptions text = {
      .paths = options.data.empty() ? config.data.validation : options.data,
      .tokenizer = {},
      .tokenizer_hash = training_text(checkpoint).tokenizer_hash,
      .vocab = config.model.vocab};
  if (text.paths.empty()) {
    fail(ExitCode::kUsage, "the run's configuration names no validation data; give it with --data");
  }
  SkippingBenchOptions bench = options.bench;
  if (bench.lengths.empty()) bench.lengths = {config.train.sequence_length};
  if (bench.tokens == 0) bench.tokens = config.train.micro_batch * config.train.sequence_length;
  const std::vector<SkippingBenchRow> rows =
      bench_skipping(checkpoint, config, select_backend(options.device), text, bench);
  if (!options.json) print_table(rows);
  for (const SkippingBenchRow& row : rows) {
    if (options.json) print_json(config.name, row);
  }
  return ExitCode::kDone;
}

}  // namespace

void add_bench_skip(Command bench, Action& action) {
  auto options = std::make_shared<BenchSkipCommand>();
  Command command = bench.add_subcommand(
      "skip",
      "What a trained model takes by length, and what stick-breaking attention saves and loses by "
      "skipping keys, by skip_epsilon");
  const Check positive = whole_numbers(int64_t{1}, int64_t{1} << 20);
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  command.add_option("--data", options->data,
                     "HDF5 document stores; default: the validation data of the run");
  command
      .add_option("--lengths", options->bench.lengths,
                  "Tokens of a window, such as 512,4096,16384; default: as in training")
      .delimiter(',')
      .check(whole_numbers(int64_t{1}, int64_t{1} << 30));
  command
      .add_option("--epsilons", options->bench.epsilons,
                  "Values of skip_epsilon; 0 is measured always")
      .delimiter(',')
      .check([](const std::string& text) {
        const std::string problem = in_range(0, 1)(text);
        return problem.empty() && std::stod(text) >= 1 ? "'" + text + "' is not below 1" : problem;
      })
      .capture_default_str();
  command
      .add_option("--tokens", options->bench.tokens,
                  "Tokens of a batch, which holds at least one window; 0: as a micro-batch of the "
                  "run")
      .check(whole_numbers(int64_t{0}, int64_t{1} << 30))
      .capture_default_str();
  command
      .add_option("--batches", options->bench.batches,
                  "Batches of each length, spread over the text")
      .check(positive)
      .capture_default_str();
  command.add_option("--repeats", options->bench.repeats, "Rounds over all batches that are timed")
      .check(positive)
      .capture_default_str();
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  command.add_flag("--json", options->json, "Print one JSON object for each row");
  command.callback([options, &action] { action = [options] { return run_bench_skip(*options); }; });
}

}  // namespace sbtrain
