#include "train/step.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/device.h"
#include "core/philox.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/communicator.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

// Peak of bf16 without sparsity on the GPUs that the project is measured on (H100 and H200 SXM).
constexpr double kPeakFlops = 989e12;

constexpr int64_t kProfiledSteps = 8;  // at most

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

PackedBatch random_batch(const Config& config, int64_t index) {
  const int64_t L = config.train.sequence_length;
  const int64_t T = L * config.train.micro_batch;
  const Philox random(1, RandomPurpose::kTest, "bench", static_cast<uint64_t>(index));
  const auto token = [&](int64_t t) {
    return static_cast<int32_t>(random.uniform(t) * static_cast<double>(config.model.vocab));
  };
  PackedBatch batch;
  for (int64_t t = 0; t < T; ++t) {
    batch.tokens.push_back(token(t));
    batch.targets.push_back(token(t + 1));
    batch.positions.push_back(static_cast<int32_t>(t % L));
  }
  for (int64_t t = 0; t <= T; t += L) batch.cu_seqlens.push_back(static_cast<int32_t>(t));
  batch.valid_targets = T;
  return batch;
}

// The beginnings of the names of ops that blocks and the embedding run outside of attention
// modules. Any op that is in no other part belongs to a module.
constexpr std::string_view kElementWise[] = {
    "add",       "bias",    "copy", "embedding", "fill", "gelu",  "head_norm",
    "layernorm", "rmsnorm", "rope", "sigmoid",   "sum",  "swiglu"};

std::string part_of(const std::string& op) {
  const auto has = [&](const char* text) { return op.find(text) != std::string::npos; };
  if (has("cross_entropy")) return "loss";
  if (is_matrix_product(op)) return "matrix products";
  if (has("adamw") || has("squared_norm") || has("finish_step")) return "optimizer";
  const auto starts = [&](std::string_view start) { return op.starts_with(start); };
  return std::ranges::any_of(kElementWise, starts) ? "element-wise" : "attention";
}

}  // namespace

BenchResult bench_step(const Config& config, Backend backend, const BenchOptions& options) {
  const auto device_free = [&] {
    return backend == Backend::kCuda ? device_memory(backend).free : 0;
  };
  const size_t free_before = device_free();
  const Transformer model(config.model, config.train.recompute);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  Memory plan = Memory::planning(backend);
  Stream planning(plan);
  TrainStep planned(config, model, planning, *communicator);
  planned.plan();
  Memory memory(backend);
  memory.adopt_plan(plan);
  Stream stream(memory);
  TrainStep step(config, model, stream, *communicator);
  step.params().initialize(config.seed);
  if (backend == Backend::kCuda) step.tune("");

  int64_t steps = 0;
  const auto run_step = [&] {
    std::vector<PackedBatch> batches;
    for (int64_t n = 0; n < config.train.batch; n += config.train.micro_batch) {
      batches.push_back(random_batch(config, steps * config.train.batch + n));
    }
    ++steps;
    const Clock::time_point start = Clock::now();
    step.run(batches, config.train.lr).wait();
    const double seconds = seconds_since(start);
    ops::run(stream, ops::Synchronize{});  // collects the times of ops that run asynchronously
    return seconds;
  };
  for (int64_t n = 0; n < options.warmup; ++n) run_step();
  std::vector<double> times;
  for (int64_t n = 0; n < options.steps; ++n) times.push_back(run_step());

  BenchResult result;
  result.tokens_per_step = config.train.tokens_per_step();
  result.step_seconds = median(times);
  result.slowest_seconds = *std::max_element(times.begin(), times.end());
  result.tokens_per_second = static_cast<double>(result.tokens_per_step) / result.step_seconds;
  const auto L = static_cast<double>(config.train.sequence_length);
  result.flops_causal = model.flops_per_token(L / 2) * result.tokens_per_second;
  result.flops_full = model.flops_per_token(L) * result.tokens_per_second;
  result.peak_flops = 1e12 * config.metrics.peak_tflops;
  if (result.peak_flops == 0 && backend == Backend::kCuda) result.peak_flops = kPeakFlops;
  result.memory_bytes = memory.report().total_bytes();
  result.memory_used = free_before - std::min(free_before, device_free());

  OpProfile profile;
  stream.set_profile(&profile);
  const int64_t profiled = std::min(options.steps, kProfiledSteps);
  for (int64_t n = 0; n < profiled; ++n) run_step();
  stream.set_profile(nullptr);
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
  std::sort(result.parts.begin(), result.parts.end(),
            [](const BenchPart& a, const BenchPart& b) { return a.seconds > b.seconds; });
  return result;
}

}  // namespace sbtrain
