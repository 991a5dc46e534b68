// sbtrain bench train | decode | attention | skip | ops | collectives: the speed of a training step
// and of its parts, and of generation.
#include "bench/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/backend.h"
#include "cli/bench_collectives.h"
#include "cli/bench_skip.h"
#include "cli/cache_options.h"
#include "cli/cli.h"
#include "cli/open_weights.h"
#include "cli/ranks.h"
#include "core/files.h"

namespace sbtrain {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMebibyte = 1 << 20;

// ---- train ------------------------------------------------------------------------------------

struct BenchTrainCommand {
  ConfigOptions config;
  BenchOptions bench;
  int gpus = 1;
  std::string init_from;  // weights; empty: random ones
  std::string trace;      // file; empty: none
  bool json = false;
};

// The model FLOPs utilisation of the passes alone, causal half: the update of a step that has many
// micro-batches, or is shared by many ranks, takes another share of it.
double mfu_of_passes(const BenchResult& result) {
  double update = 0;
  for (const BenchPart& part : result.parts) {
    if (part.name == "optimizer") update = part.seconds;
  }
  return result.flops_causal / result.peak_flops * result.step_seconds /
         (result.step_seconds - update);
}

void print_table(const Config& config, const BenchResult& result) {
  fmt::print("{}: {} tokens a step, {} micro-batch(es) of {} x {}\n", config.name,
             result.tokens_per_step, config.train.batch / config.train.micro_batch,
             config.train.micro_batch, config.train.sequence_length);
  fmt::print("  step          {:10.2f} ms   median; slowest {:.2f} ms\n", 1e3 * result.step_seconds,
             1e3 * result.slowest_seconds);
  fmt::print("  throughput    {:10.0f} tokens/s", result.tokens_per_second);
  if (result.world > 1) {
    fmt::print(" of {} ranks, {:.0f} of each", result.world,
               result.tokens_per_second / result.world);
  }
  fmt::print("\n");
  fmt::print("  arithmetic    {:10.1f} GFLOP/s causal half, {:.1f} full square\n",
             result.flops_causal / 1e9, result.flops_full / 1e9);
  if (result.peak_flops > 0) {
    fmt::print(
        "  MFU           {:10.1f} %    causal half, {:.1f} % full square, of {:.3g} TFLOP/s\n",
        100 * result.flops_causal / result.peak_flops, 100 * result.flops_full / result.peak_flops,
        result.peak_flops / 1e12);
    if (result.world == 1) {
      fmt::print("                {:10.1f} %    causal half, without the update: machine.mfu\n",
                 100 * mfu_of_passes(result));
    }
  }
  fmt::print("  memory        {:10.1f} MiB  planned",
             static_cast<double>(result.memory_bytes) / kMebibyte);
  if (result.memory_used > 0) {
    fmt::print("; used {:.1f} MiB", static_cast<double>(result.memory_used) / kMebibyte);
  }
  if (result.host_bytes > 0) {
    fmt::print("; of the host {:.1f} MiB", static_cast<double>(result.host_bytes) / kMebibyte);
  }
  if (result.keys_read >= 0) {
    fmt::print("\n  keys read     {:10.1f} %    of those that tokens see", 100 * result.keys_read);
  }
  fmt::print("\n  parts of a step{}\n", result.world > 1 ? ", rank 0" : "");
  double total = 0;
  for (const BenchPart& part : result.parts) total += part.seconds;
  for (const BenchPart& part : result.parts) {
    fmt::print("    {:<16}{:8.2f} ms  {:5.1f}%", part.name, 1e3 * part.seconds,
               100 * part.seconds / total);
    if (!part.of_ranks.empty()) {
      const auto [least, most] = std::ranges::minmax(part.of_ranks);
      fmt::print("   of all ranks {:.2f} to {:.2f}", 1e3 * least, 1e3 * most);
    }
    fmt::print("\n");
  }
  if (result.collectives.empty()) return;
  fmt::print("  collectives of a step, beside it\n");
  for (const BenchResult::Collectives& c : result.collectives) {
    fmt::print("    {:<16}{:8.2f} ms  {:4} calls, {:.2f} GB, bus {:.1f} GB/s\n", c.name,
               1e3 * c.seconds, c.calls, c.bytes / 1e9, c.bus_bytes_per_second / 1e9);
  }
}

void print_json(const Config& config, const BenchResult& result) {
  Json parts;
  for (const BenchPart& part : result.parts) parts[part.name] = part.seconds;
  Json json = {{"config", config.name},
               {"tokens_per_step", result.tokens_per_step},
               {"step_seconds", result.step_seconds},
               {"tokens_per_second", result.tokens_per_second},
               {"flops_causal", result.flops_causal},
               {"flops_full", result.flops_full},
               {"memory_bytes", result.memory_bytes},
               {"parts", parts}};
  if (result.world > 1) {
    json["world"] = result.world;
    for (const BenchPart& part : result.parts) {
      json["parts_of_ranks"][part.name] = part.of_ranks;
    }
    for (const BenchResult::Collectives& c : result.collectives) {
      json["collectives"][c.name] = {{"calls", c.calls},
                                     {"bytes", c.bytes},
                                     {"seconds", c.seconds},
                                     {"bus_bytes_per_second", c.bus_bytes_per_second}};
    }
  }
  if (result.memory_used > 0) json["memory_used_bytes"] = result.memory_used;
  if (result.host_bytes > 0) json["host_bytes"] = result.host_bytes;
  if (result.keys_read >= 0) json["keys_read"] = result.keys_read;
  if (result.peak_flops > 0) {
    json["mfu_causal"] = result.flops_causal / result.peak_flops;
    json["mfu_full"] = result.flops_full / result.peak_flops;
    if (result.world == 1) json["mfu_passes"] = mfu_of_passes(result);
    json["peak_flops"] = result.peak_flops;
  }
  fmt::print("{}\n", json.dump());
}

// In the format of traces that chrome://tracing and ui.perfetto.dev read, a row for each stream;
// times in microseconds.
void write_trace(const std::string& path, const BenchResult& result) {
  Json events = Json::array();
  std::vector<std::string> streams;
  for (const BenchResult::TraceRow& row : result.trace) {
    auto stream = std::ranges::find(streams, row.stream);
    if (stream == streams.end()) {
      stream = streams.insert(streams.end(), row.stream);
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", 0},
                        {"tid", streams.size() - 1},
                        {"args", {{"name", row.stream}}}});
    }
    events.push_back({{"ph", "X"},
                      {"name", row.op.name},
                      {"cat", row.part},
                      {"pid", 0},
                      {"tid", stream - streams.begin()},
                      {"ts", 1e6 * row.op.begin},
                      {"dur", 1e6 * row.op.seconds}});
  }
  replace_file(path, Json{{"traceEvents", events}}.dump() + "\n");
}

ExitCode bench_train_as(const Job& job, const Config& config, const BenchTrainCommand& options) {
  const Backend backend = select_rank_backend(config.device, job.launch);
  BenchOptions bench = options.bench;
  bench.trace = !options.trace.empty() && job.launch.rank == 0;
  bench.init = {.path = options.init_from, .open = open_weights};
  const BenchResult result = bench_step(config, backend, bench, job);
  if (job.launch.rank != 0) return ExitCode::kDone;
  if (bench.trace) write_trace(options.trace, result);
  options.json ? print_json(config, result) : print_table(config, result);
  return ExitCode::kDone;
}

ExitCode run_bench_train(const BenchTrainCommand& options) {
  Config config;
  return run_on_ranks(
      {.prepare =
           [&](const Launch&) {
             config = options.config.load();
             if (!options.trace.empty()) {
               check_output(options.trace, {&options.config.path, 1});
             }
             return Deadlines{};
           },
       .ranks =
           [&] {
             return options.gpus == 1 ? 1
                                      : ranks_for_gpus(options.gpus, select_backend(config.device));
           },
       .work = [&](const Job& job) { return bench_train_as(job, config, options); }});
}

void add_bench_train(Command bench, Action& action) {
  auto options = std::make_shared<BenchTrainCommand>();
  Command command =
      bench.add_subcommand("train", "A training step and its parts; the default for options only");
  command.add_option("--steps", options->bench.steps, "Steps to time; the median is reported")
      .check(whole_numbers(int64_t{1}, int64_t{1} << 20))
      .capture_default_str();
  command.add_option("--warmup", options->bench.warmup, "Steps before that")
      .check(whole_numbers(int64_t{0}, int64_t{1} << 20))
      .capture_default_str();
  command.add_option("--gpus", options->gpus, "GPUs of this machine to train on")
      .check(whole_numbers(1, 1024))
      .capture_default_str();
  command.add_option("--init-from", options->init_from,
                     "Weights of a checkpoint, of a run's newest one, or of a Hugging Face folder, "
                     "with the text of data.sources; without it both are random. Where attention "
                     "skips keys they decide how long a step takes");
  command.add_option("--trace", options->trace,
                     "File for when each op of rank 0 ran in one step on a GPU, for "
                     "ui.perfetto.dev and scripts/plot_overlap.py");
  command.add_flag("--json", options->json, "Print one JSON object");
  options->config.add(command);
  command.callback(
      [options, &action] { action = [options] { return run_bench_train(*options); }; });
}

// ---- decode -----------------------------------------------------------------------------------

struct BenchDecodeCommand {
  ConfigOptions config;
  DecodeBenchOptions bench;
  bool json = false;
};

void print_decode(const DecodeBenchRow& row, bool json) {
  const double rate = static_cast<double>(row.sequences) / row.step_seconds;
  const double share = row.bound_seconds() / row.step_seconds;
  if (!json) {
    fmt::print("{:>9}{:>11.1f}{:>11.0f}{:>11.1f}{:>7.0f}%{:>15.0f}   ", row.sequences,
               1e6 * row.step_seconds, rate, 1e6 * row.bound_seconds(), 100 * share,
               row.prefill_tokens_per_second);
    for (size_t i = 0; i < std::min<size_t>(4, row.parts.size()); ++i) {
      fmt::print("{}{} {:.0f}", i > 0 ? ", " : "", row.parts[i].name, 1e6 * row.parts[i].seconds);
    }
    fmt::print("{}\n", row.use.seen > 0 ? "; " + cache_text(row.use) : "");
    return;
  }
  Json parts;
  for (const BenchPart& part : row.parts) parts[part.name] = part.seconds;
  Json line = {{"sequences", row.sequences},
               {"step_seconds", row.step_seconds},
               {"tokens_per_second", rate},
               {"weight_bytes", row.weight_bytes},
               {"cache_bytes", row.cache_bytes},
               {"copy_bytes_per_second", row.copy_rate},
               {"bound_seconds", row.bound_seconds()},
               {"share_of_bound", share},
               {"prefill_tokens_per_second", row.prefill_tokens_per_second},
               {"parts", parts}};
  if (row.use.seen > 0) {
    line["cache"] = {{"share_kept", row.use.share_kept()},
                     {"bytes", row.use.bytes},
                     {"most_bytes", row.use.most_bytes}};
  }
  fmt::print("{}\n", line.dump());
}

ExitCode run_bench_decode(const BenchDecodeCommand& options) {
  const Config config = options.config.load();
  const std::vector<DecodeBenchRow> rows =
      bench_decode(config, select_backend(config.device), options.bench);
  if (!options.json) {
    const DecodeBenchRow& first = rows.front();
    fmt::print(
        "a step reads {:.1f} MB of weights, and {:.2f} MB of cache for each sequence; a copy "
        "reads and writes {:.1f} GB/s\n",
        first.weight_bytes / 1e6, first.cache_bytes / 1e6 / static_cast<double>(first.sequences),
        first.copy_rate / 1e9);
    fmt::print("{:>9}{:>11}{:>11}{:>11}{:>8}{:>15}   {}\n", "sequences", "step us", "tokens/s",
               "bound us", "of it", "prefill tok/s", "most of a step, us");
  }
  for (const DecodeBenchRow& row : rows) print_decode(row, options.json);
  return ExitCode::kDone;
}

void add_bench_decode(Command bench, Action& action) {
  auto options = std::make_shared<BenchDecodeCommand>();
  Command command = bench.add_subcommand(
      "decode", "Generation by several sequences at once, one token of each a step");
  const Check positive = whole_numbers(int64_t{1}, int64_t{1} << 20);
  command.add_option("--sequences", options->bench.sequences, "Numbers of sequences, one row each")
      .delimiter(',')
      .check(whole_numbers(int64_t{1}, int64_t{1024}))
      .capture_default_str();
  command.add_option("--context", options->bench.context, "Tokens of each before the first step")
      .check(positive)
      .capture_default_str();
  command.add_option("--steps", options->bench.steps, "Steps to time; the median is reported")
      .check(positive)
      .capture_default_str();
  command.add_flag("!--no-graph", options->bench.graph,
                   "On a GPU: give it the kernels of a step one by one, not as one CUDA graph");
  command.add_flag("!--no-overlap", options->bench.overlap,
                   "On a GPU: no kernel of the graph begins before the one before it has ended");
  add_cache_options(command, options->bench.dropping);
  command.add_flag("--json", options->json, "Print one JSON object for each row");
  options->config.add(command);
  command.callback(
      [options, &action] { action = [options] { return run_bench_decode(*options); }; });
}

// ---- Options of attention and ops ---------------------------------------------------------------

struct OpBenchCommand {
  DeviceChoice device = DeviceChoice::kAuto;
  bool json = false;
};

constexpr const char* kSuited = "; 0: suited to the device";
constexpr int64_t kLargestSize = int64_t{1} << 30;

void add_size(Command command, const std::string& name, int64_t& value, const std::string& help) {
  command.add_option(name, value, help + kSuited)
      .check(whole_numbers(int64_t{0}, kLargestSize))
      .capture_default_str();
}

void add_common(Command command, OpBenchCommand& common, int64_t& repeats) {
  command.add_option("--repeats", repeats, "Calls to time; the median is reported")
      .check(whole_numbers(int64_t{1}, int64_t{1} << 20))
      .capture_default_str();
  command.add_choice("--device", common.device, "auto, cpu or cuda");
  command.add_flag("--json", common.json, "Print one JSON object for each row");
}

// ---- attention ----------------------------------------------------------------------------------

struct BenchAttentionCommand : OpBenchCommand {
  AttentionBenchOptions bench;
  std::vector<std::string> changes;  // KEY=VALUE
};

ExitCode run_bench_attention(const BenchAttentionCommand& options) {
  AttentionBenchOptions bench = options.bench;
  for (const std::string& change : options.changes) {
    const size_t equals = change.find('=');
    bench.options[change.substr(0, equals)] = change.substr(equals + 1);
  }
  const std::vector<AttentionBenchRow> rows =
      bench_attention(select_backend(options.device), bench);
  if (!options.json) {
    fmt::print("{:<16}{:>6}{:>8}{:>13}{:>9}{:>14}{:>9}\n", "module", "d", "L", "forward ms",
               "TFLOP/s", "backward ms", "TFLOP/s");
  }
  for (const AttentionBenchRow& row : rows) {
    const double forward = row.forward_flops / row.forward_seconds;
    const double backward = row.backward_flops / row.backward_seconds;
    if (options.json) {
      const Json json = {{"module", row.module},
                         {"head_dim", row.head_dim},
                         {"length", row.length},
                         {"forward_seconds", row.forward_seconds},
                         {"backward_seconds", row.backward_seconds},
                         {"forward_flops", forward},
                         {"backward_flops", backward}};
      fmt::print("{}\n", json.dump());
      continue;
    }
    fmt::print("{:<16}{:>6}{:>8}{:>13.3f}{:>9.3g}{:>14.3f}{:>9.3g}\n", row.module, row.head_dim,
               row.length, 1e3 * row.forward_seconds, forward / 1e12, 1e3 * row.backward_seconds,
               backward / 1e12);
  }
  return ExitCode::kDone;
}

void add_bench_attention(Command bench, Action& action) {
  auto options = std::make_shared<BenchAttentionCommand>();
  Command command = bench.add_subcommand(
      "attention", "Attention forward and backward by head dimension and length");
  command
      .add_option("--modules", options->bench.modules,
                  fmt::format("Modules to time, of {}; default: the first two",
                              fmt::join(bench_attention_modules(), ", ")))
      .delimiter(',')
      .check(one_of_words(bench_attention_modules()));
  command.add_option("--head-dims", options->bench.head_dims, "Such as 32,64,128")
      .delimiter(',')
      .check(whole_numbers(int64_t{1}, kLargestSize));
  command.add_option("--lengths", options->bench.lengths, "Lengths of documents, such as 512,1024")
      .delimiter(',')
      .check(whole_numbers(int64_t{1}, kLargestSize));
  add_size(command, "--tokens", options->bench.tokens, "Tokens of all documents together");
  command.add_flag(
      "--ragged", options->bench.ragged,
      "Documents of many lengths, whose mean --lengths gives (log-normal, deviation 1)");
  add_size(command, "--width", options->bench.width, "Heads times head dimension");
  command
      .add_option("--options", options->changes,
                  "KEY=VALUE,...: new values of options that the modules are timed with")
      .delimiter(',')
      .check([](const std::string& text) {
        return text.find('=') == std::string::npos ? "expected KEY=VALUE" : std::string();
      });
  command.add_flag("!--any-order", options->bench.deterministic,
                   "As train.deterministic: false, which affects only cuDNN's backward pass");
  command
      .add_option("--implementation", options->bench.implementation,
                  "Implementation to run on a GPU; default: the one that training chooses")
      .check(one_of_words({"portable", "cudnn", "hopper"}));
  add_common(command, *options, options->bench.repeats);
  command.callback(
      [options, &action] { action = [options] { return run_bench_attention(*options); }; });
}

// ---- ops ----------------------------------------------------------------------------------------

struct BenchOpsCommand : OpBenchCommand {
  OpsBenchOptions bench;
};

ExitCode run_bench_ops(const BenchOpsCommand& options) {
  const std::vector<OpsBenchRow> rows = bench_ops(select_backend(options.device), options.bench);
  const double copy_rate = rows.front().bytes / rows.front().seconds;
  if (!options.json) fmt::print("{:<26}{:>10}{:>12}{:>12}\n", "op", "ms", "rate", "of copy");
  for (const OpsBenchRow& row : rows) {
    const double rate = (row.bytes + row.flops) / row.seconds;
    if (options.json) {
      Json json = {{"op", row.name}, {"seconds", row.seconds}};
      if (row.bytes > 0) json["bytes_per_second"] = rate;
      if (row.bytes > 0) json["of_copy"] = rate / copy_rate;
      if (row.flops > 0) json["flops"] = rate;
      fmt::print("{}\n", json.dump());
    } else if (row.bytes > 0) {
      fmt::print("{:<26}{:>10.3f}{:>7.0f} GB/s{:>12.2f}\n", row.name, 1e3 * row.seconds, rate / 1e9,
                 rate / copy_rate);
    } else {
      fmt::print("{:<26}{:>10.3f}{:>7.3g} TFLOP/s\n", row.name, 1e3 * row.seconds, rate / 1e12);
    }
  }
  return ExitCode::kDone;
}

void add_bench_ops(Command bench, Action& action) {
  auto options = std::make_shared<BenchOpsCommand>();
  Command command = bench.add_subcommand(
      "ops", "Memory-bound ops against a copy, and the matrix products of a block");
  add_size(command, "--tokens", options->bench.tokens, "Tokens of a micro-batch");
  add_size(command, "--width", options->bench.width, "Width of the model");
  add_size(command, "--inner", options->bench.inner, "Inner width of the MLP");
  add_size(command, "--vocab", options->bench.vocab, "Vocabulary");
  add_common(command, *options, options->bench.repeats);
  command.callback([options, &action] { action = [options] { return run_bench_ops(*options); }; });
}

}  // namespace

void add_bench(Command app, Action& action) {
  Command bench = app.add_subcommand(
      "bench",
      "Time a training step and its parts, generation, attention, skipping of keys, single ops, or "
      "collectives");
  bench.require_subcommand(1);
  add_bench_train(bench, action);
  add_bench_decode(bench, action);
  add_bench_attention(bench, action);
  add_bench_skip(bench, action);
  add_bench_ops(bench, action);
  add_bench_collectives(bench, action);
}

}  // namespace sbtrain
