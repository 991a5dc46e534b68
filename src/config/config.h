// The configuration of a run as plain structs. Parsing, validation, help and documentation come
// from the field tables in config/schema.cpp and, for attention, from the modules' own files;
// nothing below the command line reads YAML. Choices are enumerations, which
// have their words beside them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/duration.h"
#include "core/enum_names.h"
#include "core/module_options.h"
#include "layers/mlp.h"
#include "layers/norm.h"

namespace sbtrain {

struct AttentionConfig {
  std::string type = "stickbreaking";  // the module's name (attention/registry.h)
  ModuleOptions options{};             // the module's own
  bool output_bias = false;            // of the projection that follows, if there is one
  bool operator==(const AttentionConfig&) const = default;
};

enum class PositionEmbedding : uint8_t { kNone, kLearned };
template <>
inline constexpr auto kNames<PositionEmbedding> = enum_names<PositionEmbedding>(
    {{PositionEmbedding::kNone, "none"}, {PositionEmbedding::kLearned, "learned"}});

struct ModelConfig {
  int64_t layers = 4;
  int64_t width = 128;   // D
  int64_t inner = 344;   // F
  int64_t heads = 4;     // H
  int64_t kv_heads = 0;  // of keys and values, each for heads / kv_heads queries; 0: heads
  int64_t head_dim = 0;  // channels of a head; 0: width / heads
  int64_t vocab = 4096;  // V
  bool tied = true;      // the head shares the embedding's weights
  NormKind norm = NormKind::kRmsNorm;
  MlpKind mlp = MlpKind::kSwiGlu;
  PositionEmbedding position = PositionEmbedding::kNone;
  int64_t max_positions = 0;  // learned: the longest document
  double norm_eps = 1e-5;
  double init_std = 0.02;  // of matrices; projections into the residual: / sqrt(2 layers)
  // muP-like multipliers of the Power paper (arXiv 2408.13359); 1 is plain Llama.
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;
  double logits_multiplier = 1.0;
  std::vector<AttentionConfig> attention = {AttentionConfig{}};  // repeated over the layers
  int64_t head_width() const { return head_dim > 0 ? head_dim : width / heads; }
  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t query_width() const { return heads * head_width(); }      // of all queries together
  int64_t key_width() const { return key_heads() * head_width(); }  // of all keys, or all values
  bool operator==(const ModelConfig&) const = default;
};

enum class ScheduleKind : uint8_t { kConstant, kLinear, kCosine, kPower, kWsd, kExponential };
template <>
inline constexpr auto kNames<ScheduleKind> =
    enum_names<ScheduleKind>({{ScheduleKind::kConstant, "constant"},
                              {ScheduleKind::kLinear, "linear"},
                              {ScheduleKind::kCosine, "cosine"},
                              {ScheduleKind::kPower, "power"},
                              {ScheduleKind::kWsd, "wsd"},
                              {ScheduleKind::kExponential, "exponential"}});

struct ScheduleConfig {
  ScheduleKind type = ScheduleKind::kCosine;
  Duration warmup{};  // linear, from 0, at the start of the segment
  double final_ratio =
      0.0;  // lr at the end over peak lr (linear, cosine, wsd), delta (exponential)
  double decay_fraction = 0.1;  // wsd: part of the segment that decays
  double power_a = 4.0;         // power: lr = min(train.lr, a B n^b)
  double power_b = -0.51;
  double scale = 1.0;  // exponential: f of f * lr(start)
  bool operator==(const ScheduleConfig&) const = default;
};

struct SourceConfig {
  std::string path;     // HDF5 document store
  double weight = 1.0;  // share of the mixture's tokens
  bool operator==(const SourceConfig&) const = default;
};

struct StageConfig {
  std::string name = "train";
  Duration length{};
  ScheduleConfig schedule{};
  std::vector<SourceConfig> sources;  // empty: data.sources
  bool operator==(const StageConfig&) const = default;
};

// What the backward pass computes again, so that the forward pass need not keep it.
enum class Recompute : uint8_t {
  kNone,
  kSelective,  // norms and activations
  kFull,       // everything but the blocks' inputs
};
template <>
inline constexpr auto kNames<Recompute> = enum_names<Recompute>(
    {{Recompute::kNone, "none"}, {Recompute::kSelective, "selective"}, {Recompute::kFull, "full"}});

// Whether micro-batches are given to the GPU as recorded graphs.
enum class CudaGraph : uint8_t { kAuto, kOff, kOn };
template <>
inline constexpr auto kNames<CudaGraph> = enum_names<CudaGraph>({{CudaGraph::kAuto, "auto"},
                                                                 {CudaGraph::kOff, "false"},
                                                                 {CudaGraph::kOn, "true"}});

// What is spread over the ranks of a run (parallel/mesh.h).
enum class Sharding : uint8_t { kFull, kGrad, kNone, kHybrid };
template <>
inline constexpr auto kNames<Sharding> = enum_names<Sharding>({{Sharding::kFull, "full"},
                                                               {Sharding::kGrad, "grad"},
                                                               {Sharding::kNone, "none"},
                                                               {Sharding::kHybrid, "hybrid"}});

// The type in which gradients travel between ranks.
enum class ReduceType : uint8_t { kFloat32, kBfloat16 };
template <>
inline constexpr auto kNames<ReduceType> = enum_names<ReduceType>(
    {{ReduceType::kFloat32, "float32"}, {ReduceType::kBfloat16, "bfloat16"}});

// What moves data between the GPUs of a node.
enum class TransferEngine : uint8_t { kMultiprocessors, kCopyEngines };
template <>
inline constexpr auto kNames<TransferEngine> =
    enum_names<TransferEngine>({{TransferEngine::kMultiprocessors, "multiprocessors"},
                                {TransferEngine::kCopyEngines, "copy_engines"}});

struct TrainConfig {
  int64_t sequence_length = 256;  // L
  int64_t micro_batch = 4;        // sequences in one forward and backward pass
  int64_t batch = 4;              // sequences in one optimizer step, all ranks together
  double lr = 1e-3;               // peak learning rate
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // matrices only
  double clip = 1.0;          // global gradient norm; 0 turns clipping off
  double z_loss = 0.0;
  Recompute recompute = Recompute::kNone;
  bool deterministic = true;        // the same bits on every run, on the same type of device
  int64_t max_bad_steps = 10;       // skipped steps in a row before giving up
  double spike_sigma = 0.0;         // skip losses beyond mean + this * deviation; 0: none
  int64_t spike_window = 100;       // applied steps that mean and deviation cover
  std::string gpus = "auto";        // ranks of this machine: auto, or how many
  double timeout = 120;             // seconds without progress of a rank
  double rendezvous_timeout = 300;  // seconds until all ranks have come
  Sharding sharding = Sharding::kFull;
  ReduceType reduce_dtype = ReduceType::kFloat32;
  TransferEngine gather_engine = TransferEngine::kMultiprocessors;
  TransferEngine reduce_engine = TransferEngine::kMultiprocessors;
  CudaGraph cuda_graph = CudaGraph::kAuto;
  int64_t tokens_per_step() const { return batch * sequence_length; }
  bool operator==(const TrainConfig&) const = default;
};

// Multi-query associative recall, or its repeated form; kNone: data comes from files.
enum class TaskKind : uint8_t { kNone, kMqar, kMqrar };
template <>
inline constexpr auto kNames<TaskKind> = enum_names<TaskKind>({{TaskKind::kNone, "none"},
                                                               {TaskKind::kMqar, "mqar"},
                                                               {TaskKind::kMqrar, "mqrar"}});

// A synthetic task, generated during training, in place of data from files (data/task.h).
struct TaskConfig {
  TaskKind type = TaskKind::kNone;
  int64_t pairs = 32;            // K: keys in one example
  double query_power = 0.01;     // mqar: a of p(slot g) ~ (g + 1)^(a - 1)
  int64_t examples = 100000;     // in one epoch
  int64_t eval_examples = 3000;  // held out
  bool active() const { return type != TaskKind::kNone; }
  // The number of slots, of two tokens each, after the 2 K tokens that state the pairs.
  int64_t slots(int64_t length) const { return (length - 2 * pairs) / 2; }
  bool operator==(const TaskConfig&) const = default;
};

// How documents fill rows: one after the other, or with the fewest cuts.
enum class Packing : uint8_t { kConcat, kBestFit };
template <>
inline constexpr auto kNames<Packing> = enum_names<Packing>({{Packing::kConcat, "concat"},
                                                             {Packing::kBestFit, "best_fit"}});

struct DataConfig {
  std::vector<SourceConfig> sources;
  std::vector<std::string> validation;  // HDF5 document stores
  std::string tokenizer;                // of the data, for samples and bits per byte
  Packing packing = Packing::kConcat;
  bool predict_across_documents = false;
  int64_t prefetch = 4;  // micro-batches prepared ahead
  TaskConfig task{};
  bool operator==(const DataConfig&) const = default;
};

struct ValidationConfig {
  Duration every{100};
  int64_t tokens = 65536;      // at most
  double stop_accuracy = 0.0;  // tasks: training ends once it is reached; 0: never
  bool operator==(const ValidationConfig&) const = default;
};

struct CheckpointConfig {
  Duration every{500};
  int64_t keep = 3;             // newest checkpoints kept, beside the newest known to be good
  bool async = true;            // write in the background; training waits only for the copy
  std::string resume = "auto";  // auto | none | last-good | a step | path of a checkpoint
  int64_t max_failures = 3;     // failed saves in a row before giving up
  std::vector<std::string> allow_changes;  // keys that may differ from the resumed run's
  bool operator==(const CheckpointConfig&) const = default;
};

struct MetricsConfig {
  int64_t every = 10;  // steps between JSONL and TensorBoard records
  bool jsonl = true;
  bool tensorboard = true;
  bool progress = true;
  double peak_tflops = 0;  // of the device, for MFU; 0: known devices only
  bool operator==(const MetricsConfig&) const = default;
};

// The machines that a run on many GPUs is planned for (train --dry-run --world). Defaults: H100 or
// H200 nodes with NVLink 4 and 400 Gb/s a GPU. `sbtrain bench collectives` measures nvlink_gbs (the
// bus bandwidth of large tensors) and latency_us (the time of small ones).
struct MachineConfig {
  double mfu = 0.4;           // model FLOPs utilisation while a GPU computes, causal half
  double nvlink_gbs = 240;    // GB/s that a ring carries inside a node
  double network_gbs = 48;    // GB/s of one GPU's network port
  double latency_us = 20;     // of a collective, before its first byte
  double hop_us = 1.5;        // between GPUs of a node
  double network_hop_us = 8;  // between nodes
  double memory_gbs = 4000;   // of a GPU's memory
  double memory_gib = 139;    // of a GPU's memory, of which reserve_gib is not planned
  double reserve_gib = 2;     // stays free
  // A collective beside matrix products has NVLink to itself, but neither all multiprocessors nor
  // all of the memory's bandwidth: it takes `stretch` times as long, and products lose the share
  // `interference` of that time.
  double stretch = 3;
  double interference = 0.4;
  bool operator==(const MachineConfig&) const = default;
};

// kAuto: CUDA if there is a GPU.
enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
template <>
inline constexpr auto kNames<DeviceChoice> = enum_names<DeviceChoice>(
    {{DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}});

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

}  // namespace sbtrain
