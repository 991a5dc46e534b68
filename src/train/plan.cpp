#include "train/plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/device.h"
#include "core/host_memory.h"
#include "core/memory_check.h"
#include "model/transformer.h"
#include "optim/schedule.h"
#include "parallel/communicator.h"
#include "train/batch_share.h"
#include "train/plan_text.h"
#include "train/scale.h"
#include "train/step.h"

namespace sbtrain {
namespace {

std::string describe_schedule(const Config& config, const Schedule& schedule) {
  std::string text = "schedule\n";
  for (const SchedulePoint& p : schedule.preview()) {
    text += fmt::format("  step {:>12}   {:>9.3g} tokens   lr {:<10.4g} {}: {}\n", grouped(p.step),
                        static_cast<double>(p.tokens), p.lr, config.stages[p.stage].name, p.what);
  }
  return text;
}

// The modules that the layers repeat.
std::string describe_attention(const ModelConfig& model) {
  std::string types;
  for (const AttentionConfig& attention : model.attention) {
    types += (types.empty() ? "" : ", ") + attention.type;
  }
  const auto count = static_cast<int64_t>(model.attention.size());
  return fmt::format("attention         {}{}\n", types,
                     count > 1 ? fmt::format("  (repeated {} times)", model.layers / count) : "");
}

// The state that the optimizer keeps, and of how many parameters.
std::string describe_optimizer(const Config& config, const ParamRegistry& registry) {
  const auto optimizer = make_optimizer(config.train.optimizer);
  std::vector<std::pair<std::string, int64_t>> counts;
  for (const ParamUnit& unit : registry.units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      const std::string states = fmt::format("{}", fmt::join(optimizer->states(tensor.spec), ", "));
      auto found = std::ranges::find(counts, states, &std::pair<std::string, int64_t>::first);
      if (found == counts.end()) found = counts.insert(found, {states, 0});
      found->second += tensor.count;
    }
  }
  std::string text;
  for (const auto& [states, count] : counts) {
    text += fmt::format("{}{} of {}", text.empty() ? "" : "; ", states, grouped(count));
  }
  return fmt::format("optimizer         {}: {} parameters{}\n", config.train.optimizer.type, text,
                     config.train.ema > 0 ? "; the average of all (ema)" : "");
}

std::string describe_precision(const Config& config, Backend target) {
  const DType held = Memory::planning(target).compute_dtype();
  const bool chosen = config.train.precision != Precision::kAuto;
  return fmt::format("precision         {}{}: {}; sums over ranks {}\n",
                     name_of(config.train.precision),
                     chosen ? "" : ", bf16 or fp8 as the first start times them, planned as bf16",
                     precision_policy(config.train.precision, held).describe(),
                     name_of(config.train.reduce_dtype));
}

std::string epochs_text(const Config& config, int64_t steps) {
  if (!config.data.task.active()) return "";
  const double examples = static_cast<double>(steps) * static_cast<double>(config.train.batch);
  return fmt::format(", {:.4g} epochs of {} examples of {}",
                     examples / static_cast<double>(config.data.task.examples),
                     grouped(config.data.task.examples), name_of(config.data.task.type));
}

// The files that a run would miss; it would end before its first step.
std::string describe_missing(const Config& config) {
  std::set<std::string> files(config.data.validation.begin(), config.data.validation.end());
  const auto add = [&](const std::vector<SourceConfig>& sources) {
    for (const SourceConfig& source : sources) files.insert(source.path);
  };
  add(config.data.sources);
  for (const StageConfig& stage : config.stages) add(stage.sources);
  if (!config.data.tokenizer.empty()) files.insert(config.data.tokenizer);
  std::string text;
  for (const std::string& file : files) {
    std::error_code unreadable;
    if (std::filesystem::exists(file, unreadable)) continue;
    text += fmt::format("missing           {}: a run ends with exit code 4 without it\n", file);
  }
  return text;
}

std::string describe_duration(double flops, Backend target, const Config& config) {
  const double peak =
      target == Backend::kCpu ? config.metrics.peak_tflops : gpu_peak_tflops(config);
  const double mfu = config.machine.mfu;
  if (peak == 0) {
    return "duration          not known for this processor; `sbtrain bench train` measures a step, "
           "--peak-tflops gives an estimate\n";
  }
  return fmt::format(
      "duration          {} on one device at {:.0f}% MFU (causal half) of {:.4g} TFLOP/s\n",
      duration_text(flops / (mfu * peak * 1e12)), mfu * 100, peak);
}

// How the ranks that share sequences share the work.
std::string describe_context(const TrainConfig& train, const Transformer& model) {
  const int64_t ranks = train.context_parallel;
  if (ranks == 1) return "";
  const auto cost = [&](double keys) { return model.flops_per_token(keys); };
  const ContextLayout layout = context_layout(train, cost);
  std::string balance;
  for (const ContextLayout one : {ContextLayout::kConsecutive, ContextLayout::kFolded}) {
    const int64_t chunks = chunks_of_rank(one) * ranks;
    if (train.micro_batch * train.sequence_length % chunks != 0) continue;
    balance += fmt::format("{}{:.2f} {}", balance.empty() ? "" : ", ",
                           context_balance(train, one, cost), name_of(one));
  }
  return fmt::format(
      "context           {} ranks share a micro-batch, {} tokens each, {}; with one document in a "
      "row and nothing skipped the busiest has this many times the work of the mean: {}\n",
      ranks, grouped(train.micro_batch * train.sequence_length / ranks), name_of(layout), balance);
}

}  // namespace

double gpu_peak_tflops(const Config& config) {
  return config.metrics.peak_tflops > 0 ? config.metrics.peak_tflops : kGpuPeakTflops;
}

namespace {

struct StepMemory {
  MemoryReport device;
  size_t host = 0;  // beside it
};

StepMemory plan_step_memory(const Config& config, Backend target) {
  Memory memory = Memory::planning(target);
  Stream stream(memory);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  const Transformer model(config.model, config.train.recompute);
  TrainStep step(config, model, stream, mesh);
  step.plan();
  return {.device = memory.report(), .host = step.host_bytes()};
}

// Whether a run on this machine would be refused because of the host's memory. Another machine may
// be meant.
std::string describe_lack(size_t host_bytes) {
  const HostMemory host = host_memory();
  if (host_bytes <= host.free) return "";
  return fmt::format(
      "does not fit      train.offload keeps more in the host's memory than the {:.2f} GiB that {} "
      "has free here\n",
      gibibytes(host.free), host.limit);
}

std::string describe_step_memory(const Config& config, Backend target) {
  const TrainConfig& train = config.train;
  const bool offloads = train.offload != Offload::kNone;
  const StepMemory memory = plan_step_memory(config, target);
  const size_t libraries = library_memory(target, 1);
  std::string text =
      fmt::format("memory            one device ({}), micro-batch {}, recompute {}{}\n{}",
                  backend_name(target), train.micro_batch, name_of(train.recompute),
                  offloads ? fmt::format(", offload {}", name_of(train.offload)) : "",
                  describe_memory(memory.device, libraries));
  if (offloads) {
    text += fmt::format("  {:<12} {:>9.2f} GiB, page-locked: the inputs of blocks\n", "of the host",
                        gibibytes(memory.host));
    text += describe_lack(memory.host);
  }
  const double needed = gibibytes(memory.device.total_bytes() + libraries);
  const double available = config.machine.memory_gib - config.machine.reserve_gib;
  if (target != Backend::kCuda || needed <= available) return text;
  text += fmt::format(
      "does not fit      a rank may use {:.0f} of the {:.0f} GiB of a GPU (machine.memory_gib, "
      "machine.reserve_gib)\n",
      available, config.machine.memory_gib);
  if (offloads) return text;
  Config other = config;
  other.train.offload = Offload::kActivations;
  const StepMemory with = plan_step_memory(other, target);
  return text +
         fmt::format(
             "                  train.offload: activations makes it {:.2f} GiB, and {:.2f} of "
             "the host's memory\n",
             gibibytes(with.device.total_bytes() + libraries), gibibytes(with.host));
}

double flops_per_token(const Transformer& model, const Config& config, double share_of_row) {
  const auto length = static_cast<double>(config.train.sequence_length);
  const double with_target = static_cast<double>(targets_of_row(config)) / length;
  return model.flops_per_token(share_of_row * length, with_target);
}

}  // namespace

MemoryReport plan_memory(const Config& config, Backend target) {
  return plan_step_memory(config, target).device;
}

double causal_flops_per_token(const Transformer& model, const Config& config) {
  return flops_per_token(model, config, 0.5);
}

double full_flops_per_token(const Transformer& model, const Config& config) {
  return flops_per_token(model, config, 1);
}

std::string describe_run(const Config& config, Backend target, const DryRunOptions& options) {
  const Transformer model(config.model);
  const TrainConfig& train = config.train;
  const Schedule schedule = schedule_of(config);
  const double causal = causal_flops_per_token(model, config);
  std::string text = fmt::format("{}: {} layers, width {}, {} heads of {}, vocabulary {}\n",
                                 config.name, config.model.layers, config.model.width,
                                 config.model.heads, config.model.head_width(), config.model.vocab);
  text += describe_attention(config.model);
  text += fmt::format("parameters        {}\n", grouped(model.registry().count()));
  text += describe_optimizer(config, model.registry());
  text += fmt::format("tokens per step   {}  ({} sequences of {}, {} micro-batches of {})\n",
                      grouped(train.tokens_per_step()), train.batch, train.sequence_length,
                      train.batch / train.micro_batch, train.micro_batch);
  text += describe_precision(config, target);
  text += fmt::format("FLOPs per token   {:.4g} causal half, {:.4g} full square\n", causal,
                      full_flops_per_token(model, config));
  text += fmt::format("steps             {}  ({:.4g} tokens{})\n", grouped(schedule.total_steps()),
                      static_cast<double>(schedule.total_tokens()),
                      epochs_text(config, schedule.total_steps()));
  text += describe_missing(config);
  text += describe_duration(causal * static_cast<double>(schedule.total_tokens()), target, config);
  text += describe_context(train, model);
  text += describe_step_memory(config, target);
  text += describe_schedule(config, schedule);
  if (options.world > 0) text += describe_scale(config, target, options);
  return text;
}

}  // namespace sbtrain
