// The reports of a run while it trains: the progress line, metrics.jsonl and TensorBoard events.
//
// A step number is the count of finished optimizer steps, so the record of step 1 belongs to the
// first step and a validation before training has step 0. A checkpoint of step N is the state that
// the records up to N describe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/run_config.h"

namespace sbtrain {

// Names of the values in metrics.jsonl and TensorBoard. They are part of the file format.
namespace metric {
inline constexpr char kTrainLoss[] = "train/loss";              // nats per token, z-loss excluded
inline constexpr char kTrainLr[] = "train/lr";                  // learning rate of the step
inline constexpr char kTrainGradNorm[] = "train/grad_norm";     // before clipping
inline constexpr char kTrainSkipped[] = "train/skipped_steps";  // non-finite ones, so far
inline constexpr char kTrainSpikes[] = "train/spike_steps";     // skipped as spikes, so far
inline constexpr char kTrainStage[] = "train/stage";            // index in `stages`
inline constexpr char kTrainTokensPerSecond[] = "train/tokens_per_second";  // since last record
// Of the time since the last record, the part for which computation waited for other ranks, 0 to 1.
inline constexpr char kTrainExposed[] = "train/exposed_communication";
inline constexpr char kTrainMfu[] = "train/mfu";  // 0 to 1, if the device's peak is known
inline constexpr char kValidationLoss[] = "validation/loss";  // nats per token
inline constexpr char kValidationPerplexity[] = "validation/perplexity";
inline constexpr char kValidationAccuracy[] = "validation/accuracy";  // of tasks, 0 to 1
inline constexpr char kValidationBitsPerByte[] = "validation/bits_per_byte";
}  // namespace metric

struct Metric {
  std::string name;
  double value = 0.0;
};

struct MetricRecord {
  int64_t step = 0;
  double wall_time = 0.0;  // Unix seconds
  std::vector<Metric> values;
};

struct MetricsOptions {
  std::string run_dir;  // holds metrics.jsonl and tensorboard/
  MetricsConfig config{};
  int64_t total_steps = 0;
  int64_t tokens_per_step = 0;
  double flops_per_token = 0.0;         // of forward and backward, for MFU; 0: unknown
  double peak_flops = 0.0;              // per second, of all devices of the run; 0: unknown
  std::optional<int64_t> resumed_step;  // finished steps of the checkpoint resumed from
  std::string config_yaml;              // shown by TensorBoard; empty: nothing
  int rank = 0;                         // ranks other than 0 report nothing
  int world = 1;
  bool times_waits = false;  // StepMetrics::waited is measured, as it is on GPUs alone
  int progress_fd = 2;       // where the progress line goes
};

struct StepMetrics {
  int64_t step = 0;  // finished steps, this one included
  double loss = 0.0;
  double lr = 0.0;
  double grad_norm = 0.0;
  int64_t skipped_steps = 0;  // so far, because they were not finite
  int64_t spike_steps = 0;    // so far, skipped because of their loss
  int stage = 0;
  double waited = 0.0;  // seconds for which computation stood still for collectives
  // When the step ended, by Metrics::seconds(); nothing: now. Rates are of the time between the
  // ends of steps, whenever the host comes to note them.
  std::optional<double> ended{};
};

struct ValidationMetrics {
  double loss = 0.0;                 // nats per token
  int64_t tokens = 0;                // predicted
  int64_t bytes = 0;                 // of the text of those tokens; 0: unknown
  std::optional<double> accuracy{};  // of a task
};

// A separate thread writes the files: no call below waits for a disk, except flush(), sync()
// and the destructor. A file that cannot be written is reported once in the log, and training
// continues.
class Metrics {
 public:
  // Opens the files. Throws ExitCode::kStorage when that fails.
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Once per step: redraws the progress line; writes a record every metrics.every steps and for
  // the first and the last one.
  void train_step(const StepMetrics& step);

  // Writes a record and prints a line above the progress line.
  void validation(int64_t step, const ValidationMetrics& result);

  // Writes any other values to the files only.
  void record(int64_t step, std::vector<Metric> values);

  // Seconds of training so far; 0 on other ranks than 0.
  double seconds() const;
  // Time between pause() and resume() (validation, saving) does not count in tokens per second.
  void pause();
  void resume();

  // Returns when the operating system has received all records so far.
  void flush();
  // Returns when the disk has what flush() has waited for; may be called from another thread. If
  // both are called before a checkpoint is committed, none is newer than the files, not even after
  // a power failure. A file that cannot be flushed is reported in the log.
  void sync() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null on ranks other than 0
};

// Pauses the clock of tokens per second for a scope.
class MetricsPause {
 public:
  explicit MetricsPause(Metrics& metrics) : metrics_(metrics) { metrics_.pause(); }
  ~MetricsPause() { metrics_.resume(); }
  MetricsPause(const MetricsPause&) = delete;
  MetricsPause& operator=(const MetricsPause&) = delete;

 private:
  Metrics& metrics_;
};

}  // namespace sbtrain
