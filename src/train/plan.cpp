#include "train/plan.h"

#include <fmt/format.h>

#include "core/memory_check.h"
#include "model/transformer.h"
#include "optim/schedule.h"
#include "parallel/communicator.h"
#include "train/step.h"

namespace sbtrain {
namespace {

std::string grouped(int64_t n) {  // 1,208,083,968
  std::string digits = std::to_string(n);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) digits.insert(i, ",");
  return digits;
}

std::string duration_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} seconds", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} minutes", seconds / 60);
  if (seconds < 172800) return fmt::format("{:.1f} hours", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

std::string describe_schedule(const Config& config, const Schedule& schedule) {
  std::string text = "schedule\n";
  for (const SchedulePoint& p : schedule.preview()) {
    text += fmt::format("  step {:>12}   {:>9.3g} tokens   lr {:<10.4g} {}: {}\n", grouped(p.step),
                        static_cast<double>(p.tokens), p.lr, config.stages[p.stage].name, p.what);
  }
  return text;
}

}  // namespace

MemoryReport plan_memory(const Config& config, Backend target) {
  Memory memory = Memory::planning(target);
  Stream stream(memory);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Transformer model(config.model, config.train.recompute);
  TrainStep step(config, model, stream, *communicator);
  step.plan();
  return memory.report();
}

std::string describe_run(const Config& config, Backend target, const DryRunOptions& options) {
  const Transformer model(config.model);
  const TrainConfig& train = config.train;
  const Schedule schedule(config.stages, train.lr, train.batch, train.tokens_per_step());
  const double L = static_cast<double>(train.sequence_length);
  const double causal = model.flops_per_token(L / 2);
  const double full = model.flops_per_token(L);
  const double seconds = causal * static_cast<double>(schedule.total_tokens()) /
                         (options.mfu * options.peak_tflops * 1e12);

  std::string text = fmt::format("{}: {} layers, width {}, {} heads of {}, vocabulary {}\n",
                                 config.name, config.model.layers, config.model.width,
                                 config.model.heads, config.model.head_dim(), config.model.vocab);
  text += fmt::format("parameters        {}\n", grouped(model.registry().count()));
  text += fmt::format("tokens per step   {}  ({} sequences of {}, {} micro-batches of {})\n",
                      grouped(train.tokens_per_step()), train.batch, train.sequence_length,
                      train.batch / train.micro_batch, train.micro_batch);
  text += fmt::format("FLOPs per token   {:.4g} causal half, {:.4g} full square\n", causal, full);
  text += fmt::format("steps             {}  ({:.4g} tokens)\n", grouped(schedule.total_steps()),
                      static_cast<double>(schedule.total_tokens()));
  text += fmt::format(
      "duration          {} on one device at {:.0f}% MFU (causal half) of {:.0f} TFLOP/s\n",
      duration_text(seconds), options.mfu * 100, options.peak_tflops);
  text += fmt::format("memory            one device ({}), micro-batch {}, recompute {}\n{}",
                      backend_name(target), train.micro_batch, name_of(train.recompute),
                      describe_memory(plan_memory(config, target)));
  return text + describe_schedule(config, schedule);
}

}  // namespace sbtrain
