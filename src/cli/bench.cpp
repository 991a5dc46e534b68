// sbtrain bench: the speed of a training step and of its parts.
#include "train/bench.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/backend.h"
#include "cli/cli.h"

namespace sbtrain {
namespace {

struct BenchCommand {
  ConfigOptions config;
  BenchOptions bench;
  bool json = false;
};

void print_table(const Config& config, const BenchResult& result) {
  fmt::print("{}: {} tokens a step, {} micro-batch(es) of {} x {}\n", config.name,
             result.tokens_per_step, config.train.batch / config.train.micro_batch,
             config.train.micro_batch, config.train.sequence_length);
  fmt::print("  step          {:10.2f} ms   median; slowest {:.2f} ms\n", 1e3 * result.step_seconds,
             1e3 * result.slowest_seconds);
  fmt::print("  throughput    {:10.0f} tokens/s\n", result.tokens_per_second);
  fmt::print("  arithmetic    {:10.1f} GFLOP/s causal half, {:.1f} full square\n",
             result.flops_causal / 1e9, result.flops_full / 1e9);
  fmt::print("  memory        {:10.1f} MiB planned\n",
             static_cast<double>(result.memory_bytes) / (1 << 20));
  double total = 0;
  for (const BenchPart& part : result.parts) total += part.seconds;
  fmt::print("  parts of a step\n");
  for (const BenchPart& part : result.parts) {
    fmt::print("    {:<16}{:8.2f} ms  {:5.1f}%\n", part.name, 1e3 * part.seconds,
               100 * part.seconds / total);
  }
}

void print_json(const Config& config, const BenchResult& result) {
  nlohmann::json parts;
  for (const BenchPart& part : result.parts) parts[part.name] = part.seconds;
  fmt::print("{}\n", nlohmann::json{{"config", config.name},
                                    {"tokens_per_step", result.tokens_per_step},
                                    {"step_seconds", result.step_seconds},
                                    {"tokens_per_second", result.tokens_per_second},
                                    {"flops_causal", result.flops_causal},
                                    {"flops_full", result.flops_full},
                                    {"memory_bytes", result.memory_bytes},
                                    {"parts", parts}}
                         .dump());
}

ExitCode run_bench(const BenchCommand& options) {
  const Config config = options.config.load();
  const BenchResult result = bench_step(config, select_backend(config.device), options.bench);
  if (options.json) {
    print_json(config, result);
  } else {
    print_table(config, result);
  }
  return ExitCode::kDone;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchCommand>();
  CLI::App* command =
      app.add_subcommand("bench", "Time a training step and its parts on random tokens");
  command->add_option("--steps", options->bench.steps, "Steps to time; the median counts")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--warmup", options->bench.warmup, "Steps before that")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object");
  options->config.add(*command);
  command->callback([options, &action] { action = [options] { return run_bench(*options); }; });
}

}  // namespace sbtrain
