#include "train/scale.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "core/device.h"
#include "core/error.h"
#include "core/host_memory.h"
#include "core/memory_check.h"
#include "model/transformer.h"
#include "optim/schedule.h"
#include "parallel/matrix_update.h"
#include "parallel/mesh.h"
#include "parallel/state_ranges.h"
#include "train/batch_share.h"
#include "train/communicator_options.h"
#include "train/engines.h"
#include "train/plan_text.h"
#include "train/step.h"

namespace sbtrain {
namespace {

// What an update reads and writes for one parameter: the master, which is written too, the compute
// copy, the gradient, and the gradient once more for its norm; and what it does for each state,
// which is read and written.
constexpr double kUpdateBytes = 18;
constexpr double kStateBytes = 8;
// Of a matrix that has an owner, what goes there and what comes back, each in bf16.
constexpr double kTravelBytes = 2;

// Seconds of an update: of what it reads and writes on every rank, and of the matrices that the
// owner with the most work transforms. `beside`: of these, while matrices travel; what is done
// before the first group leaves, and after the last one is back, is about one group's share.
struct UpdateSeconds {
  double all = 0, beside = 0;
};
UpdateSeconds update_seconds(const Config& config, const ParamRegistry& registry,
                             const Mesh& mesh) {
  const auto optimizer = make_optimizer(config.train.optimizer);
  const MatrixRanks ranks = ranks_of(mesh);
  double bytes = 0, flops = 0;
  for (const ParamUnit& unit : registry.units()) {
    bytes += kUpdateBytes * static_cast<double>(unit.size);
    if (config.train.ema > 0) bytes += kStateBytes * static_cast<double>(unit.size);
    for (const StateRange& range : state_ranges(unit, *optimizer, 0, unit.size)) {
      bytes +=
          kStateBytes * static_cast<double>(range.names.size()) * static_cast<double>(range.size);
      if (range.matrix != nullptr && mesh.world().world() > 1) {
        bytes += kTravelBytes * static_cast<double>(range.size) * (1 + 1.0 / ranks.replicas);
      }
    }
  }
  const std::vector<MatrixGroup> groups = plan_matrices(registry, *optimizer, ranks);
  for (const MatrixGroup& group : groups) flops += group.flops;
  const double all = bytes / mesh.shard_count() / (1e9 * config.machine.memory_gbs) +
                     flops / (config.machine.mfu * gpu_peak_tflops(config) * 1e12);
  const auto count = static_cast<double>(groups.size());
  return {.all = all, .beside = groups.empty() ? 0 : all * (count - 1) / count};
}

// Which transfers are the copy engines': a communicator that has them gathers and exchanges so.
void mark_copied(Traffic& traffic, const TrainConfig& train) {
  if (!communicator_options(train).copy_engines) return;
  for (Transfer& t : traffic.transfers) {
    t.copied = t.group.ranks > 1 && t.group.nodes == 1 &&
               (t.collective == Collective::kAllGather || t.collective == Collective::kAllToAll);
  }
}

constexpr double kGibibyte = 1 << 30;

double model_seconds(const Config& config, const Transformer& model, const DryRunOptions& options) {
  const auto tokens = static_cast<double>(config.train.tokens_per_step()) / options.world;
  return tokens * causal_flops_per_token(model, config) /
         (config.machine.mfu * gpu_peak_tflops(config) * 1e12);
}

// Tokens per second of all ranks.
double rate(const RankPlan& plan) {
  return static_cast<double>(plan.config.train.tokens_per_step()) / plan.seconds();
}

std::string memory_table(const std::vector<RankPlan>& plans, const MachineConfig& machine) {
  std::string text = fmt::format("  {:<8}", "mode");
  for (int c = 0; c < kMemoryClasses; ++c) {
    text += fmt::format("{:>12}", memory_class_name(static_cast<MemoryClass>(c)));
  }
  text += fmt::format("{:>11}{:>10}{:>11}{:>12}\n", "libraries", "total", "ms a step", "tokens/s");
  for (const RankPlan& plan : plans) {
    text += fmt::format("  {:<8}", name_of(plan.config.train.sharding));
    for (const size_t bytes : bytes_by_class(plan.memory)) {
      text += fmt::format("{:>12.3f}", static_cast<double>(bytes) / kGibibyte);
    }
    text += fmt::format("{:>11.2f}{:>10.2f}{:>11.1f}{:>12}{}\n",
                        static_cast<double>(plan.libraries) / kGibibyte,
                        static_cast<double>(plan.total_bytes()) / kGibibyte, 1e3 * plan.seconds(),
                        grouped(std::llround(rate(plan))), plan.fits ? "" : "  does not fit");
  }
  return text + fmt::format(
                    "  GiB, and tokens/s of all ranks; a rank may use {:.0f} of the {:.0f} "
                    "GiB of a GPU\n",
                    machine.memory_gib - machine.reserve_gib, machine.memory_gib);
}

std::string traffic_table(const RankPlan& plan, const MachineConfig& machine) {
  struct Row {
    int64_t calls = 0;
    double bytes = 0, alone = 0;
  };
  using Key = std::tuple<Collective, int, int, int64_t>;  // ranks, nodes, bytes of one
  std::map<Key, Row> rows;
  for (const Transfer& t : plan.traffic.transfers) {
    Row& row = rows[{t.collective, t.group.ranks, t.group.nodes, t.bytes}];
    row.calls += 1;
    row.bytes += static_cast<double>(t.bytes);
    row.alone += seconds(t, machine);
  }
  std::string text =
      fmt::format("  {:<16}{:>7}{:>7}{:>8}{:>12}{:>12}{:>11}{:>11}\n", "collective", "ranks",
                  "nodes", "calls", "MiB each", "GiB a step", "ms each", "ms a step");
  for (const auto& [key, row] : rows) {
    const auto& [collective, ranks, nodes, bytes] = key;
    text += fmt::format("  {:<16}{:>7}{:>7}{:>8}{:>12.2f}{:>12.3f}{:>11.3f}{:>11.2f}\n",
                        collective_name(collective), ranks, nodes, row.calls,
                        static_cast<double>(bytes) / (1 << 20), row.bytes / kGibibyte,
                        1e3 * row.alone / static_cast<double>(row.calls), 1e3 * row.alone);
  }
  return text;
}

std::string rate_text(const RankPlan& plan, int world, double steps) {
  return fmt::format("{:.1f} ms a step, {} tokens/s, {} a GPU, {}", 1e3 * plan.seconds(),
                     grouped(std::llround(rate(plan))), grouped(std::llround(rate(plan) / world)),
                     duration_text(steps * plan.seconds()));
}

std::string step_text(const RankPlan& plan) {
  const StepEstimate& e = plan.estimate;
  return fmt::format(
      "  computation {:.1f} ms, the update {:.1f} ms\n"
      "  communication {:.1f} ms, of which {:.1f} ms are exposed; beside it products lose {:.1f} "
      "ms{}\n",
      1e3 * e.compute, 1e3 * plan.optimizer, 1e3 * e.communication, 1e3 * e.exposed,
      1e3 * e.interference,
      e.slowest > 0 ? fmt::format("; the slowest GPU takes {:.1f} ms longer", 1e3 * e.slowest)
                    : "");
}

}  // namespace

RankPlan plan_rank(const Config& config, Backend target, const DryRunOptions& options) {
  const TrainConfig& train = config.train;
  check_batch(train, options.world);
  RankPlan plan;
  plan.config = config;
  UpdateSeconds update;
  const auto run = [&](Traffic* record, const auto& program) {
    // Of ranks that share sequences the last one makes the most visits (attention/context.h).
    const auto ranks = make_planned(static_cast<int>(train.context_parallel) - 1, options.world,
                                    options.gpus_per_node, record);
    const Mesh mesh(*ranks, train.sharding, options.gpus_per_node,
                    static_cast<int>(train.context_parallel));
    const Transformer model(config.model, train.recompute, mesh.shard_count());
    Memory memory = Memory::planning(target);
    Stream stream(memory);
    TrainStep step(config, model, stream, mesh);
    program(step);
    plan.memory = memory.report();
    plan.host = step.host_bytes();
    plan.libraries = library_memory(target, options.world);
    plan.compute = model_seconds(config, model, options);
    update = update_seconds(config, model.registry(), mesh);
  };
  run(&plan.traffic, [](TrainStep& step) { step.plan_step(); });
  run(nullptr, [](TrainStep& step) { step.plan(); });
  mark_copied(plan.traffic, train);
  plan.optimizer = update.all;
  const double available = (config.machine.memory_gib - config.machine.reserve_gib) * kGibibyte;
  plan.fits = static_cast<double>(plan.total_bytes()) <= available;
  plan.estimate = estimate_step(
      plan.traffic, plan.compute, config.machine,
      {.sharding = train.sharding,
       .micro_batches = train.batch * train.context_parallel / (train.micro_batch * options.world),
       .update = update.beside});
  return plan;
}

std::vector<RankPlan> plan_choices(const Config& config, Backend target,
                                   const DryRunOptions& options) {
  // Sequences of a rank, or of those that share them.
  const int64_t share = config.train.batch * config.train.context_parallel / options.world;
  std::vector<int64_t> micro_batches = {config.train.micro_batch};
  for (int64_t m = 1; m <= share; m *= 2) {
    if (share % m == 0 && m != config.train.micro_batch) micro_batches.push_back(m);
  }
  std::vector<RankPlan> plans;
  for (const int64_t micro_batch : micro_batches) {
    for (const auto& [sharding, name] : kNames<Sharding>) {
      const bool nodes =
          options.world > options.gpus_per_node && options.world % options.gpus_per_node == 0;
      if (sharding == Sharding::kHybrid && !nodes) continue;
      Config choice = config;
      choice.train.micro_batch = micro_batch;
      choice.train.sharding = sharding;
      plans.push_back(plan_rank(choice, target, options));
    }
  }
  return plans;
}

std::string describe_scale(const Config& wanted, Backend target, const DryRunOptions& options) {
  Config config = wanted;
  // The plan's machines have NVLink.
  config.train = with_engines(config.train, options.world <= options.gpus_per_node);
  std::string note;
  const int64_t micro_batch = largest_micro_batch(config.train, options.world);
  if (micro_batch > 0 && micro_batch < config.train.micro_batch) {
    note = fmt::format(
        "train.micro_batch {} cannot divide {} sequences among {} ranks: the plan is that of "
        "--train.micro_batch={}\n",
        config.train.micro_batch, config.train.batch, options.world, micro_batch);
    config.train.micro_batch = micro_batch;
  }
  const std::vector<RankPlan> plans = plan_choices(config, target, options);
  const auto mine = std::ranges::find_if(plans, [&](const RankPlan& plan) {
    return plan.config.train.sharding == config.train.sharding;
  });
  const TrainConfig& train = config.train;
  const Schedule schedule = schedule_of(config);
  const auto steps = static_cast<double>(schedule.total_steps());
  std::string text = note;
  text += fmt::format(
      "{} rank{}         {} a node, estimated at {:.0f}% MFU while computing (causal half) of "
      "{:.0f} TFLOP/s\n"
      "memory of a rank, micro-batch {}, recompute {}\n",
      options.world, options.world == 1 ? "" : "s", std::min(options.gpus_per_node, options.world),
      config.machine.mfu * 100, gpu_peak_tflops(config), train.micro_batch,
      name_of(train.recompute));
  std::vector<RankPlan> of_micro_batch;
  std::ranges::copy_if(plans, std::back_inserter(of_micro_batch), [&](const RankPlan& plan) {
    return plan.config.train.micro_batch == train.micro_batch;
  });
  text += memory_table(of_micro_batch, config.machine);
  if (train.offload != Offload::kNone && mine != plans.end()) {
    const auto ranks = static_cast<size_t>(std::min(options.gpus_per_node, options.world));
    text += fmt::format(
        "  beside it each rank takes {:.2f} GiB of the host's memory, page-locked, those of a node "
        "{:.2f} (train.offload)\n",
        gibibytes(mine->host), gibibytes(ranks * mine->host));
  }
  if (mine != plans.end()) {
    text += fmt::format("a step with sharding {}\n{}{}  {}\n", name_of(train.sharding),
                        traffic_table(*mine, config.machine), step_text(*mine),
                        rate_text(*mine, options.world, steps));
  }
  const auto best = std::min_element(plans.begin(), plans.end(), [](const auto& a, const auto& b) {
    return std::tuple(!a.fits, a.seconds()) < std::tuple(!b.fits, b.seconds());
  });
  if (!best->fits) {
    return text + "no choice fits: lower train.sequence_length, or set train.recompute: full\n";
  }
  return text + fmt::format("the fastest that fits: sharding {}, micro-batch {}: {}\n",
                            name_of(best->config.train.sharding), best->config.train.micro_batch,
                            rate_text(*best, options.world, steps));
}

}  // namespace sbtrain
