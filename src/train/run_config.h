// The configuration of a run as plain structs: each part stands with its owner, and what is left
// here is of the run itself. config/ reads, checks, prints and documents it from tables of fields
// (config/schema.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_config.h"
#include "core/context_layout.h"
#include "core/device_choice.h"
#include "core/duration.h"
#include "core/enum_names.h"
#include "core/precision.h"
#include "data/data_config.h"
#include "model/model_config.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "parallel/machine.h"
#include "parallel/sharding.h"

namespace sbtrain {

// Whether micro-batches are given to the GPU as recorded graphs.
enum class CudaGraph : uint8_t { kAuto, kOff, kOn };
template <>
inline constexpr auto kNames<CudaGraph> = enum_names<CudaGraph>({{CudaGraph::kAuto, "auto"},
                                                                 {CudaGraph::kOff, "false"},
                                                                 {CudaGraph::kOn, "true"}});

// What goes to the host's memory between its uses.
enum class Offload : uint8_t {
  kNone,
  kActivations,  // the inputs of blocks, between their forward and their backward pass
};
template <>
inline constexpr auto kNames<Offload> =
    enum_names<Offload>({{Offload::kNone, "none"}, {Offload::kActivations, "activations"}});

struct TrainConfig {
  int64_t sequence_length = 256;  // L
  int64_t micro_batch = 4;        // sequences in one forward and backward pass
  int64_t batch = 4;              // sequences in one optimizer step, all ranks together
  double lr = 1e-3;               // peak learning rate
  OptimizerConfig optimizer{};
  double weight_decay = 0.1;  // matrices only
  double ema = 0.0;           // decay of the average of the weights; 0: none is kept
  double clip = 1.0;          // global gradient norm; 0 turns clipping off
  double z_loss = 0.0;
  Recompute recompute = Recompute::kNone;
  Offload offload = Offload::kNone;
  bool deterministic = true;        // the same bits on every run, on the same type of device
  int64_t max_bad_steps = 10;       // skipped steps in a row before giving up
  double spike_sigma = 0.0;         // skip losses beyond mean + this * deviation; 0: none
  int64_t spike_window = 100;       // applied steps that mean and deviation cover
  std::string gpus = "auto";        // ranks of this machine: auto, or how many
  double timeout = 120;             // seconds without progress of a rank
  double rendezvous_timeout = 300;  // seconds until all ranks have come
  Sharding sharding = Sharding::kFull;
  ReduceType reduce_dtype = ReduceType::kFloat32;
  TransferEngine gather_engine = TransferEngine::kAuto;
  TransferEngine reduce_engine = TransferEngine::kAuto;
  CudaGraph cuda_graph = CudaGraph::kAuto;
  Precision precision = Precision::kBf16;
  int64_t context_parallel = 1;  // ranks that share the tokens of a micro-batch
  ContextLayout context_layout = ContextLayout::kAuto;
  int64_t tokens_per_step() const { return batch * sequence_length; }
  bool operator==(const TrainConfig&) const = default;
};

// A segment of the schedule, and what it trains on.
struct StageConfig : ScheduleStage {
  std::vector<SourceConfig> sources;  // empty: data.sources
  bool operator==(const StageConfig&) const = default;
};

struct ValidationConfig {
  Duration every{100};
  int64_t tokens = 65536;      // at most
  double stop_accuracy = 0.0;  // tasks: training ends once it is reached; 0: never
  bool operator==(const ValidationConfig&) const = default;
};

struct MetricsConfig {
  int64_t every = 10;  // steps between JSONL and TensorBoard records
  bool jsonl = true;
  bool tensorboard = true;
  bool progress = true;
  double peak_tflops = 0;  // of the device, for MFU; 0: known devices only
  bool operator==(const MetricsConfig&) const = default;
};

struct Config {
  std::string name = "run";
  std::string out;  // run folder; empty: runs/<name>
  uint64_t seed = 1;
  DeviceChoice device = DeviceChoice::kAuto;
  ModelConfig model{};
  TrainConfig train{};
  DataConfig data{};
  std::vector<StageConfig> stages;  // at least one
  ValidationConfig validation{};
  CheckpointConfig checkpoint{};
  MetricsConfig metrics{};
  MachineConfig machine{};
  std::string run_dir() const { return out.empty() ? "runs/" + name : out; }
  bool operator==(const Config&) const = default;
};

// The tokens of a row whose logits training computes: those that a task labels, or all of a text,
// and all where ranks share sequences, whose parts have as many labels as chance gives them.
inline int64_t targets_of_row(const Config& config) {
  const int64_t length = config.train.sequence_length;
  const bool some = config.data.task.active() && config.train.context_parallel == 1;
  return some ? config.data.task.targets(length) : length;
}

// The learning rate of every step of the run.
inline Schedule schedule_of(const Config& config) {
  const TrainConfig& train = config.train;
  return {
      {config.stages.begin(), config.stages.end()}, train.lr, train.batch, train.tokens_per_step()};
}

}  // namespace sbtrain
