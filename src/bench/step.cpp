#include "train/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <sstream>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/device.h"
#include "core/log.h"
#include "eval/reach.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/make_communicator.h"
#include "parallel/network.h"
#include "parallel/traffic.h"
#include "train/batch_share.h"
#include "train/communicator_options.h"
#include "train/engines.h"
#include "train/initial_weights.h"
#include "train/plan.h"
#include "train/precision_choice.h"
#include "train/random_rows.h"
#include "train/run_data.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

// Peak of bf16 without sparsity on the GPUs that the project is measured on (H100 and H200 SXM).
constexpr double kPeakFlops = 989e12;

constexpr int64_t kProfiledSteps = 8;  // at most

// Of each step, this rank's micro-batches of the text that a run would begin with.
std::vector<std::vector<PackedBatch>> text_of_steps(const Config& config, const Mesh& mesh,
                                                    int64_t steps) {
  Loader loader(loader_options(config, mesh, /*stage=*/0));
  loader.check_vocab(config.model.vocab);
  std::vector<std::vector<PackedBatch>> text(static_cast<size_t>(steps));
  for (std::vector<PackedBatch>& step : text) {
    for (int64_t n = 0; n < loader.micro_batches_per_step(); ++n) step.push_back(loader.next());
  }
  return text;
}

// The beginnings of the names of ops that blocks and the embedding run outside of attention
// modules. Any op that is in no other part belongs to a module.
constexpr std::string_view kElementWise[] = {
    "add",          "bias",      "copy",    "embedding", "fill",    "gelu", "head_norm",
    "head_rmsnorm", "layernorm", "rmsnorm", "rope",      "sigmoid", "sum",  "swiglu"};

std::string part_of(const std::string& op) {
  const auto has = [&](const char* text) { return op.find(text) != std::string::npos; };
  if (has("cross_entropy")) return "loss";
  if (is_matrix_product(op)) return "matrix products";
  if (op == "amax" || has("fp8")) return "casts to fp8";
  if (op == ContextRing::kAwait) return "waits for keys";
  if (op == "await" || op == "all_reduce") return "communication";
  if (op == "await_offload") return "offload";
  for (const char* part :
       {"adamw", "muon", "orthogonalize", "average_weights", "squared_norm", "finish_step"}) {
    if (has(part)) return "optimizer";
  }
  const auto starts = [&](std::string_view start) { return op.starts_with(start); };
  return std::ranges::any_of(kElementWise, starts) ? "element-wise" : "attention";
}

// The collectives of one step: bytes as they are planned, times as they were measured.
std::vector<BenchResult::Collectives> collectives_of(const Traffic& planned,
                                                     const OpProfile& profile, int64_t steps) {
  std::vector<BenchResult::Collectives> out;
  for (const Transfer& transfer : planned.transfers) {
    const std::string name = collective_name(transfer.collective);
    const auto found = profile.entries().find(name);
    if (found == profile.entries().end()) continue;  // on the stream that computes
    auto row = std::ranges::find(out, name, &BenchResult::Collectives::name);
    if (row == out.end()) row = out.insert(out.end(), {.name = name});
    row->calls += 1;
    row->bytes += static_cast<double>(transfer.bytes);
    row->seconds = found->second.seconds / static_cast<double>(steps);
    row->bus_bytes_per_second += static_cast<double>(transfer.bytes) *
                                 ring_share(transfer.collective, transfer.group.ranks) /
                                 row->seconds;
  }
  return out;
}

// The parts of all ranks beside this one's; those that this rank does not have take it no time.
void add_parts_of_ranks(std::vector<BenchPart>& parts, Communicator& ranks) {
  std::string own;
  for (const BenchPart& part : parts) own += fmt::format("{:.9g} {}\n", part.seconds, part.name);
  const std::vector<std::string> texts = ranks.all_gather(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    double seconds = 0;
    for (std::string name; lines >> seconds && std::getline(lines >> std::ws, name);) {
      auto part = std::ranges::find(parts, name, &BenchPart::name);
      if (part == parts.end()) part = parts.insert(parts.end(), {.name = name});
      part->of_ranks.resize(texts.size());
      part->of_ranks[rank] = seconds;
    }
  }
}

// What a step of this rank moves.
Traffic plan_traffic(const Config& config, const Transformer& model, Backend backend,
                     const Job& job) {
  Traffic traffic;
  const int node_size = job.launch.local_world;
  const auto ranks = make_planned(job.launch.rank, job.launch.world, node_size, &traffic);
  const Mesh mesh(*ranks, config.train.sharding, node_size,
                  static_cast<int>(config.train.context_parallel));
  Memory memory = Memory::planning(backend);
  Stream stream(memory);
  TrainStep(config, model, stream, mesh).plan_step();
  return traffic;
}

}  // namespace

BenchResult bench_step(const Config& asked, Backend backend, const BenchOptions& options,
                       const Job& job) {
  Config config = asked;
  if (options.trace && backend != Backend::kCuda) {
    fail(ExitCode::kUsage, "only a step on a GPU can be traced: elsewhere ops run one by one");
  }
  check_batch(config.train, job.launch.world);
  config.train = with_engines(config.train, *job.control, job.launch, backend);
  const auto device_free = [&] {
    return backend == Backend::kCuda ? device_memory(backend).free : 0;
  };
  const size_t free_before = device_free();
  const std::unique_ptr<Communicator> communicator =
      make_communicator(*job.control, backend, communicator_options(config.train));
  const int world = communicator->world();
  if (config.train.precision == Precision::kAuto) {
    const PrecisionChoice choice = choose_precision(config, backend, *communicator);
    log_info("train.precision: auto is {}: {}", name_of(choice.precision), choice.reason);
    config.train.precision = choice.precision;
  }
  const Mesh mesh(*communicator, config.train.sharding, job.launch.local_world,
                  static_cast<int>(config.train.context_parallel));
  const Transformer model(config.model, config.train.recompute, mesh.shard_count());
  const Traffic traffic = world > 1 ? plan_traffic(config, model, backend, job) : Traffic{};
  Memory plan = Memory::planning(backend);
  Stream planning(plan);
  TrainStep planned(config, model, planning, mesh);
  planned.plan();
  const bool counts_keys = config.train.context_parallel == 1;
  const Transformer counting(config.model, Recompute::kNone, mesh.shard_count());
  if (counts_keys) planned.plan_keys_read(counting);
  Memory memory(backend);
  prepare_memory(memory, communicator_options(config.train), world);
  memory.adopt_plan(plan);
  Stream stream(memory);
  TrainStep step(config, model, stream, mesh);
  step.params().initialize(config.seed);
  std::vector<std::vector<PackedBatch>> text;  // random tokens are drawn anew
  if (!options.init.path.empty()) {
    load_initial_weights(options.init, config, *communicator, model.registry(), step.params());
    text = text_of_steps(config, mesh, options.warmup + options.steps);
  }
  if (backend == Backend::kCuda) step.tune("", communicator->rank() == 0);

  Stream* const communication = step.params().communication();
  const auto batches_of = [&](int64_t n) {
    if (!text.empty()) return text[static_cast<size_t>(n)];
    std::vector<PackedBatch> batches;
    const int64_t share = config.train.batch / mesh.data_ranks();
    const int64_t first = n * config.train.batch + mesh.data_rank() * share;
    for (int64_t i = 0; i < share; i += config.train.micro_batch) {
      batches.push_back(random_rows(config.train, config.model, targets_of_row(config), first + i));
    }
    return batches;
  };
  const auto run_step = [&](int64_t n) {
    const std::vector<PackedBatch> batches = batches_of(n);
    job.control->progress("a step");
    const Clock::time_point start = Clock::now();
    step.run(batches, /*lr=*/0.0).wait();
    const double seconds = seconds_since(start);
    // Collects the times of ops that run asynchronously.
    ops::run(stream, ops::Synchronize{});
    if (communication) ops::run(*communication, ops::Synchronize{});
    return seconds;
  };
  for (int64_t n = 0; n < options.warmup; ++n) run_step(n);
  std::vector<double> times;
  for (int64_t n = 0; n < options.steps; ++n) times.push_back(run_step(options.warmup + n));

  BenchResult result;
  result.tokens_per_step = config.train.tokens_per_step();
  result.step_seconds = median(times);
  result.slowest_seconds = *std::max_element(times.begin(), times.end());
  result.tokens_per_second = static_cast<double>(result.tokens_per_step) / result.step_seconds;
  result.flops_causal = causal_flops_per_token(model, config) * result.tokens_per_second;
  result.flops_full = full_flops_per_token(model, config) * result.tokens_per_second;
  result.peak_flops = 1e12 * config.metrics.peak_tflops * world;
  if (result.peak_flops == 0 && backend == Backend::kCuda) result.peak_flops = kPeakFlops * world;
  result.memory_bytes = memory.report().total_bytes() + library_memory(backend, world);
  result.host_bytes = step.host_bytes();
  result.memory_used = free_before - std::min(free_before, device_free());

  OpProfile profile;
  OpProfile communication_profile;
  stream.set_profile(&profile);
  if (communication) communication->set_profile(&communication_profile);
  const int64_t profiled = std::min(options.steps, kProfiledSteps);
  std::vector<ops::TracedOp> computed, communicated;
  for (int64_t n = 0; n < profiled; ++n) {
    if (options.trace && n == profiled - 1) {
      std::vector<ops::Traced> traced = {{&stream, &computed}};
      if (communication) traced.push_back({communication, &communicated});
      ops::control(stream).trace(traced);
    }
    run_step(options.warmup + n);
  }
  stream.set_profile(nullptr);
  if (communication) communication->set_profile(nullptr);
  for (const ops::TracedOp& op : computed)
    result.trace.push_back({"compute", part_of(op.name), op});
  for (const ops::TracedOp& op : communicated) {
    result.trace.push_back({"communication", "collective", op});
  }
  if (counts_keys) {
    const std::vector<KeysRead> layers =
        step.keys_read(counting, batches_of(options.warmup).front());
    const KeysRead all = all_of(layers);
    if (all.visible > 0) result.keys_read = share_read(all);
  }
  result.world = world;
  result.collectives = collectives_of(traffic, communication_profile, profiled);
  std::map<std::string, double> parts;
  for (const auto& [op, entry] : profile.entries()) {
    if (op != "synchronize") parts[part_of(op)] += entry.seconds / static_cast<double>(profiled);
  }
  double accounted = 0;
  for (const auto& [name, seconds] : parts) {
    accounted += seconds;
    result.parts.push_back({name, seconds});
  }
  result.parts.push_back({"idle", std::max(0.0, result.step_seconds - accounted)});
  if (world > 1) add_parts_of_ranks(result.parts, *communicator);
  std::sort(result.parts.begin(), result.parts.end(),
            [](const BenchPart& a, const BenchPart& b) { return a.seconds > b.seconds; });
  return result;
}

}  // namespace sbtrain
