#include "cli/bench_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "cli/backend.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "core/log.h"

namespace sbtrain {
namespace {

struct BenchCollectivesCommand {
  CollectivesBenchOptions bench;
  DeviceChoice device = DeviceChoice::kAuto;
  int gpus = 0;  // 0: all
  bool json = false;
};

void print_json(const CollectivesBenchRow& row) {
  nlohmann::ordered_json json = {
      {"collective", collective_name(row.collective)},
      {"dtype", dtype_name(row.dtype)},
      {"setting", row.setting},
      {"bytes", row.bytes},
      {"seconds", row.seconds},
      {"bus_bytes_per_second", row.bus_factor * row.bytes / row.seconds}};
  if (row.beside_seconds > 0) {
    json["beside_products_seconds"] = row.beside_seconds;
    json["products_slowdown"] = row.products_slowdown;
  }
  fmt::print("{}\n", json.dump());
}

void print_table(const std::vector<CollectivesBenchRow>& rows, int world) {
  const bool beside = std::ranges::any_of(
      rows, [](const CollectivesBenchRow& row) { return row.beside_seconds > 0; });
  fmt::print("{} rank{}; rates in GB/s{}\n", world, world == 1 ? "" : "s",
             beside ? "; beside matrix products of another stream" : "");
  fmt::print("{:<16}{:<6}{:<14}{:>9}{:>10}{:>10}{:>8}", "collective", "type", "setting", "MiB",
             "ms", "algorithm", "bus");
  if (beside) fmt::print("{:>13}{:>18}", "beside, ms", "products slower");
  fmt::print("\n");
  for (const CollectivesBenchRow& row : rows) {
    const double rate = row.bytes / row.seconds / 1e9;
    fmt::print("{:<16}{:<6}{:<14}{:>9.1f}{:>10.3f}{:>10.1f}{:>8.1f}",
               collective_name(row.collective), dtype_name(row.dtype), row.setting,
               row.bytes / (1 << 20), 1e3 * row.seconds, rate, rate * row.bus_factor);
    if (beside) {
      fmt::print("{:>13.3f}{:>17.1f}%", 1e3 * row.beside_seconds,
                 100 * (row.products_slowdown - 1));
    }
    fmt::print("\n");
  }
}

ExitCode run_as_rank(const Job& job, const BenchCollectivesCommand& options) {
  const Backend backend = select_rank_backend(options.device, job.launch);
  if (job.launch.world == 1) {
    log_warning(
        "one rank exchanges nothing: these times are those of the calls. It takes several GPUs, or "
        "ranks on the CPU: mpirun -n 2 sbtrain bench collectives --device=cpu");
  }
  const std::vector<CollectivesBenchRow> rows =
      bench_collectives(*job.control, backend, options.bench);
  if (job.launch.rank > 0) return ExitCode::kDone;
  if (!options.json) print_table(rows, job.launch.world);
  for (const CollectivesBenchRow& row : rows) {
    if (options.json) print_json(row);
  }
  return ExitCode::kDone;
}

ExitCode run_bench_collectives(const BenchCollectivesCommand& options) {
  return run_on_ranks(
      {.ranks = [&] { return ranks_for_gpus(options.gpus, select_backend(options.device)); },
       .work = [&](const Job& job) { return run_as_rank(job, options); }});
}

}  // namespace

void add_bench_collectives(Command bench, Action& action) {
  auto options = std::make_shared<BenchCollectivesCommand>();
  Command command = bench.add_subcommand(
      "collectives", "What ranks exchange, by size: time and bandwidth, alone and beside products");
  command
      .add_option("--sizes", options->bench.mebibytes,
                  "MiB of the whole tensors, such as 8,64,256; default: suited to the device")
      .delimiter(',')
      .check(whole_numbers(1, 1 << 16));
  command
      .add_option("--ctas", options->bench.ctas,
                  "The most thread blocks of a collective, such as 0,16,8; 0: NCCL's choice")
      .delimiter(',')
      .check(whole_numbers(0, 64))
      .capture_default_str();
  command.add_flag("--copy-engines", options->bench.copy_engines,
                   "Time all-gathers by the copy engines too");
  command.add_option("--repeats", options->bench.repeats, "Calls to time; the median is reported")
      .check(whole_numbers(1, 1 << 20))
      .capture_default_str();
  command
      .add_option("--gpus", options->gpus,
                  "GPUs of this machine, one rank on each; default: all. Not for ranks that a "
                  "launcher has started")
      .check(whole_numbers(1, 1024));
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  command.add_flag("--json", options->json, "Print one JSON object for each row");
  command.callback(
      [options, &action] { action = [options] { return run_bench_collectives(*options); }; });
}

}  // namespace sbtrain
