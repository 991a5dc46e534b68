// The configuration of a run as plain structs. Parsing, validation, help and documentation come
// from the field tables in config/schema.cpp; nothing below the command line reads YAML.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sbtrain {

// A span of training, in optimizer steps, in tokens or in epochs of a task: "300 steps",
// "2e9 tokens", "64 epochs", or a bare number of steps.
struct Duration {
  enum class Unit : uint8_t { kSteps, kTokens, kEpochs };
  int64_t count = 0;
  Unit unit = Unit::kSteps;
  // Whole optimizer steps, rounded up. Epochs have become tokens when the configuration was loaded.
  int64_t steps(int64_t tokens_per_step) const {
    return unit == Unit::kSteps ? count : (count + tokens_per_step - 1) / tokens_per_step;
  }
  bool operator==(const Duration&) const = default;
};

struct AttentionConfig {
  std::string type = "stickbreaking";  // stickbreaking | softmax | coca | based | rebased |
                                       // short_conv
  double logit_scale = 0.0;            // 0: 1/sqrt(head_dim)
  // stickbreaking
  std::string remainder = "none";  // none | value | bias
  bool head_norm = false;
  bool attend_current = false;
  bool forget_gate = false;
  double skip_epsilon = 5.9604644775390625e-08;  // 2^-24; 0 turns skipping off
  // softmax, coca
  int64_t window = 0;             // keys that a token sees, itself included; 0: all
  std::string position = "rope";  // rope | alibi | fire | none
  bool shared = false;            // fire: one network for all layers that say so
  double rope_base = 10000.0;
  std::string rope_scaling = "none";  // none | linear | ntk | dynamic_ntk
  double rope_factor = 1.0;
  int64_t rope_train_length = 0;  // dynamic_ntk: lengths beyond this one are scaled
  // coca
  std::string variant = "official";  // official | strict
  // based, rebased
  int64_t feature_dim = 16;      // of queries and keys, for each head
  std::string form = "chunked";  // chunked | quadratic
  // any but short_conv
  bool output_bias = false;
  bool operator==(const AttentionConfig&) const = default;
};

struct ModelConfig {
  int64_t layers = 4;
  int64_t width = 128;            // D
  int64_t inner = 344;            // F
  int64_t heads = 4;              // H; head_dim = width / heads
  int64_t vocab = 4096;           // V
  bool tied = true;               // the head shares the embedding's weights
  std::string norm = "rmsnorm";   // rmsnorm | layernorm
  std::string mlp = "swiglu";     // swiglu | gelu | none
  std::string position = "none";  // none | learned
  int64_t max_positions = 0;      // learned: the longest document
  double norm_eps = 1e-5;
  double init_std = 0.02;  // of matrices; projections into the residual: / sqrt(2 layers)
  // muP-like multipliers of the Power paper (arXiv 2408.13359); 1 is plain Llama.
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;
  double logits_multiplier = 1.0;
  std::vector<AttentionConfig> attention = {AttentionConfig{}};  // repeated over the layers
  int64_t head_dim() const { return width / heads; }
  bool operator==(const ModelConfig&) const = default;
};

struct ScheduleConfig {
  std::string type = "cosine";  // constant | linear | cosine | power | wsd | exponential
  Duration warmup{};            // linear, from 0, at the start of the segment
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
  std::string recompute = "none";  // none | selective | full: what the backward pass recomputes
  bool deterministic = true;       // the same bits on every run, on the same type of device
  int64_t max_bad_steps = 10;      // non-finite steps in a row before giving up
  std::string sharding = "full";   // what is spread over the ranks; there is one for now
  int64_t tokens_per_step() const { return batch * sequence_length; }
  bool operator==(const TrainConfig&) const = default;
};

// A synthetic task, made while training, in place of data from files (data/task.h).
struct TaskConfig {
  std::string type = "none";     // none | mqar | mqrar
  int64_t pairs = 32;            // K: keys in one example
  double query_power = 0.01;     // mqar: a of p(slot g) ~ (g + 1)^(a - 1)
  int64_t examples = 100000;     // of one epoch
  int64_t eval_examples = 3000;  // held out
  bool active() const { return type != "none"; }
  // Pairs of tokens behind the 2 K ones that state the pairs.
  int64_t slots(int64_t length) const { return (length - 2 * pairs) / 2; }
  bool operator==(const TaskConfig&) const = default;
};

struct DataConfig {
  std::vector<SourceConfig> sources;
  std::vector<std::string> validation;  // HDF5 document stores
  std::string tokenizer;                // sentencepiece model, for samples and bits per byte
  std::string packing = "concat";       // concat | best_fit
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
  int64_t keep = 3;             // newest checkpoints kept
  bool async = true;            // write in the background; training waits for the copy alone
  std::string resume = "auto";  // auto | none | path of a checkpoint
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

struct Config {
  std::string name = "run";
  std::string out;  // run folder; empty: runs/<name>
  uint64_t seed = 1;
  std::string device = "auto";  // auto | cpu | cuda
  ModelConfig model{};
  TrainConfig train{};
  DataConfig data{};
  std::vector<StageConfig> stages;  // at least one
  ValidationConfig validation{};
  CheckpointConfig checkpoint{};
  MetricsConfig metrics{};
  std::string run_dir() const { return out.empty() ? "runs/" + name : out; }
  bool operator==(const Config&) const = default;
};

}  // namespace sbtrain
