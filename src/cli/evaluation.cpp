#include "cli/evaluation.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "cli/run_tokenizer.h"
#include "config/stored_config.h"
#include "core/device.h"
#include "core/files.h"
#include "train/host_share.h"

namespace sbtrain {
namespace {

// The checkpoint that rank 0 finds: the newest one may change while a job saves.
CheckpointReader open_for_all(Control& ranks, const std::string& path) {
  std::optional<CheckpointReader> mine;
  if (ranks.rank() == 0) mine.emplace(open_checkpoint(path));
  const std::vector<std::string> folders = ranks.exchange(
      "checkpoint to evaluate", all_ranks(ranks.world()), mine ? mine->folder().string() : "");
  return mine ? std::move(*mine) : open_checkpoint(folders.front());
}

}  // namespace

void EvalOptions::check() const {
  const bool windows = !lengths.empty() || benefit > 0;
  if (tokens_per_length_option.given() && !windows) {
    fail(ExitCode::kUsage, "--tokens-per-length requires --lengths or --benefit");
  }
  if (bootstrap_option.given() && ((!windows && window == 0) || reach)) {
    fail(ExitCode::kUsage, "--bootstrap requires losses by --lengths, --benefit or --window");
  }
  if (tasks.asked() && cache.drop_below.size() > 1) {
    fail(ExitCode::kUsage, "--drop-below: with --tasks there is one bound, not {}",
         cache.drop_below.size());
  }
}

Evaluation::Evaluation(const EvalOptions& options, const Job& job)
    : options(options),
      ranks(*job.control),
      node(job.launch.node),
      local_world(job.launch.local_world),
      // Where one rank measures attention, the others have ended.
      checkpoint(options.attention.asked() ? open_checkpoint(options.checkpoint)
                                           : open_for_all(ranks, options.checkpoint)),
      config(stored_config(checkpoint)),
      backend(select_rank_backend(options.device, job.launch)) {
  if (options.ema) checkpoint.use_average();
  options.rope.apply(config);
  if (!options.json_file.empty()) check_output(options.json_file, inputs());
}

std::vector<std::string> Evaluation::inputs() const {
  std::vector<std::string> files = options.data.empty() ? config.data.validation : options.data;
  const TextTaskSelection& tasks = options.tasks.text_tasks;
  files.insert(files.end(),
               {tokenizer(), options.attention.true_positions, tasks.haystack, tasks.word_list});
  std::error_code gone;  // a job that saves may have removed the checkpoint
  for (const auto& file : std::filesystem::directory_iterator(checkpoint.folder(), gone)) {
    files.push_back(file.path().string());
  }
  return files;
}

std::string Evaluation::tokenizer() const {
  return run_tokenizer(checkpoint, config, options.tokenizer);
}

HeldOutOptions Evaluation::held_out(int64_t length) const {
  return {.paths = options.data.empty() ? config.data.validation : options.data,
          .tokenizer = tokenizer(),
          .tokenizer_hash = training_text(checkpoint).tokenizer_hash,
          .vocab = config.model.vocab,
          .sequence_length = length,
          .micro_batch = std::max<int64_t>(1, tokens_at_once() / length),
          .max_tokens = options.tokens > 0 ? options.tokens : kAllTokens,
          .predict_across_documents = config.data.predict_across_documents};
}

MemoryReport Evaluation::plan(int64_t length) const {
  MemoryReport plan =
      plan_evaluation(config.model, backend, std::max(tokens_at_once(), length), length);
  require_memory_for(plan);
  return plan;
}

void Evaluation::require_memory_for(const MemoryReport& plan) const {
  require_room(backend, plan);
  if (backend == Backend::kCpu && !options.attention.asked()) {
    require_shared_memory(ranks, node, plan.total_bytes(), "the evaluation");
  }
}

size_t Evaluation::room() const {
  const size_t free = device_memory(backend).free;
  return backend == Backend::kCpu ? free / static_cast<size_t>(local_world) : free;
}

Json Evaluation::header() const {
  Json json = {{"checkpoint", options.checkpoint},
               {"name", config.name},
               {"step", checkpoint.manifest().step}};
  if (options.ema) json["ema"] = true;
  return json;
}

std::string Evaluation::step() const {
  return fmt::format("step {}{}", checkpoint.manifest().step,
                     options.ema ? ", average of the weights" : "");
}

void fail_without_data() {
  fail(ExitCode::kUsage, "the run's configuration names no validation data; give it with --data");
}

}  // namespace sbtrain
