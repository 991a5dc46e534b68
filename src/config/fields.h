// The schema: one description of every configuration key, from which parsing, validation,
// overrides, printing, --help and docs/config.md all follow. A visitor V is handed each key with
// the member it stands for:
//
//   v.field(key, member, rule, help)    int64_t, uint64_t, double, bool, std::string, Duration or
//                                       std::vector<std::string>
//   v.section(key, member, help)        a struct with keys of its own
//   v.list(key, member, rule, help)     std::vector of such structs
//
// Defaults are the members' initial values in config/config.h.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/config.h"

namespace sbtrain::schema {

// What a value must satisfy, and when its key means anything.
struct Rule {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself is excluded
  bool below_max = false;  // max itself is excluded
  std::vector<std::string_view> choices;
  bool required = false;
  bool single = false;  // lists: one item may stand without a list
  // The key applies only while `when_key` of the same section has one of `when_values`.
  std::string_view when_key;
  std::vector<std::string_view> when_values;

  Rule when(std::string_view key, std::vector<std::string_view> values) const;
  Rule needed() const;
  bool allows(double value) const;
  std::string range() const;      // "at least 1"; empty without bounds
  std::string condition() const;  // "type softmax"; empty when it always applies
};

Rule any();
Rule at_least(double min);
Rule above(double min);
Rule between(double min, double max);
Rule from_to_below(double min, double max);
Rule one_of(std::vector<std::string_view> choices);

// Which values the section being visited has shown so far, to tell whether a rule applies.
class Conditions {
 public:
  void enter() { scopes_.emplace_back(); }
  void leave() { scopes_.pop_back(); }
  void note(std::string_view key, const std::string& value) {
    scopes_.back().emplace_back(key, value);
  }
  bool applies(const Rule& rule) const;

 private:
  std::vector<std::vector<std::pair<std::string, std::string>>> scopes_;
};

// Bounds that keep every product of sizes far inside 64 bits.
inline constexpr double kMaxSize = 1 << 24;
inline constexpr double kMaxCount = 1e18;

template <class V>
void describe(V& v, AttentionConfig& c) {
  v.field(
      "type", c.type,
      one_of({"stickbreaking", "softmax", "coca", "based", "rebased", "short_conv"}),
      "What mixes tokens: an attention module, or a convolution over three tokens (short_conv).");
  v.field("logit_scale", c.logit_scale,
          at_least(0).when("type", {"stickbreaking", "softmax", "coca", "based", "rebased"}),
          "Factor of q.k; 0: 1/sqrt(head_dim), or 1/sqrt(feature_dim) with based and rebased.");
  const Rule stickbreaking = any().when("type", {"stickbreaking"});
  v.field("remainder", c.remainder,
          one_of({"none", "value", "bias"}).when("type", {"stickbreaking"}),
          "What receives the part of the stick that is left over: nothing, the token's own value, "
          "or a learned vector of each head.");
  v.field("head_norm", c.head_norm, stickbreaking,
          "Normalise each head's output (mean and variance, affine).");
  v.field("attend_current", c.attend_current, stickbreaking,
          "A token attends to itself as well; otherwise only to those before it.");
  v.field("forget_gate", c.forget_gate, stickbreaking,
          "A learned gate of each key and head scales its attention.");
  v.field("skip_epsilon", c.skip_epsilon, from_to_below(0, 1).when("type", {"stickbreaking"}),
          "Earlier keys are skipped once every row of a tile has less than this left of its stick; "
          "0 turns skipping off.");
  v.field("window", c.window, between(0, kMaxSize).when("type", {"softmax", "coca"}),
          "Keys that a token sees, itself included; 0: all of its document.");
  v.field("position", c.position,
          one_of({"rope", "alibi", "fire", "none"}).when("type", {"softmax", "coca"}),
          "Position encoding: rotary, linear biases (ALiBi), a learned function of the distance "
          "(FIRE), or none (NoPE). coca is made of rope and takes no other.");
  v.field("shared", c.shared, any().when("position", {"fire"}),
          "One FIRE network for all layers instead of one for each.");
  v.field("rope_base", c.rope_base, above(0).when("position", {"rope"}),
          "Base of the rotary frequencies.");
  v.field("rope_scaling", c.rope_scaling,
          one_of({"none", "linear", "ntk", "dynamic_ntk"}).when("position", {"rope"}),
          "How rotary positions reach beyond the trained length: slower positions (linear), a "
          "larger base (ntk), or a base that grows with the length (dynamic_ntk).");
  v.field("rope_factor", c.rope_factor,
          above(0).when("rope_scaling", {"linear", "ntk", "dynamic_ntk"}),
          "linear: positions are divided by it; ntk: alpha of base alpha^(d/(d-2)); dynamic_ntk: f "
          "of base (f L/L_train - (f-1))^(d/(d-2)).");
  v.field("rope_train_length", c.rope_train_length,
          between(0, kMaxSize).when("rope_scaling", {"dynamic_ntk"}),
          "L_train of dynamic_ntk: the sequence length that the model was trained with.");
  v.field("variant", c.variant, one_of({"official", "strict"}).when("type", {"coca"}),
          "What the authors' code computes, or the paper's equations 8 and 12.");
  const std::vector<std::string_view> polynomial = {"based", "rebased"};
  v.field("feature_dim", c.feature_dim, between(1, 256).when("type", polynomial),
          "Features of queries and keys for each head; values have width / heads, rounded down.");
  v.field("form", c.form, one_of({"chunked", "quadratic"}).when("type", polynomial),
          "How it is computed: with a state, linear in the length, or over all pairs of tokens.");
  v.field("output_bias", c.output_bias,
          any().when("type", {"stickbreaking", "softmax", "coca", "based", "rebased"}),
          "The output projection has a bias.");
}

template <class V>
void describe(V& v, ModelConfig& c) {
  v.field("layers", c.layers, between(1, 10000), "Transformer blocks.");
  v.field("width", c.width, between(1, kMaxSize), "Model width D.");
  v.field("inner", c.inner, between(1, kMaxSize), "Inner width F of the MLP.");
  v.field("heads", c.heads, between(1, kMaxSize), "Attention heads H; head_dim is width / heads.");
  v.field("vocab", c.vocab, between(2, kMaxSize),
          "Vocabulary size V; the tokenizer of the data must not have more.");
  v.field("tied", c.tied, any(), "The output head shares the embedding's weights.");
  v.field("norm", c.norm, one_of({"rmsnorm", "layernorm"}), "Normalisation before each sublayer.");
  v.field("norm_eps", c.norm_eps, above(0), "Epsilon of the normalisation.");
  v.field("mlp", c.mlp, one_of({"swiglu", "gelu", "none"}),
          "The second half of a block: SwiGLU; GELU with biases; or none, which adds the "
          "normalised input to the residual stream.");
  v.field("position", c.position, one_of({"none", "learned"}),
          "What is added to the embedding: nothing, or a learned vector for each position.");
  v.field("max_positions", c.max_positions, between(0, kMaxSize).when("position", {"learned"}),
          "Learned positions: the longest document that the model takes.");
  v.field("init_std", c.init_std, above(0),
          "Standard deviation of initial matrices; projections into the residual stream have "
          "it divided by sqrt(2 layers).");
  v.field("embedding_multiplier", c.embedding_multiplier, above(0),
          "Factor of the embedding's output (muP; arXiv 2408.13359 uses 12).");
  v.field("residual_multiplier", c.residual_multiplier, above(0),
          "Factor of what each sublayer adds to the residual stream (muP; 0.22 there).");
  v.field("logits_multiplier", c.logits_multiplier, above(0), "Factor of the logits (muP).");
  Rule attention = any();
  attention.single = true;
  v.list("attention", c.attention, attention,
         "The attention module. A list of them (model.attention.0.type, ...) is repeated over the "
         "layers: its length divides `layers`.");
}

template <class V>
void describe(V& v, TrainConfig& c) {
  v.field("sequence_length", c.sequence_length, between(1, kMaxSize),
          "Tokens in one training sequence (L).");
  v.field("micro_batch", c.micro_batch, between(1, kMaxSize),
          "Sequences in one forward and backward pass.");
  v.field("batch", c.batch, between(1, kMaxSize),
          "Sequences in one optimizer step, all ranks together; a multiple of micro_batch.");
  v.field("lr", c.lr, at_least(0), "Peak learning rate.");
  v.field("beta1", c.beta1, from_to_below(0, 1), "AdamW: decay of the first moment.");
  v.field("beta2", c.beta2, from_to_below(0, 1), "AdamW: decay of the second moment.");
  v.field("eps", c.eps, above(0), "AdamW: epsilon.");
  v.field("weight_decay", c.weight_decay, at_least(0),
          "AdamW: decoupled weight decay, of matrices only.");
  v.field("clip", c.clip, at_least(0), "Largest global gradient norm; 0 turns clipping off.");
  v.field("z_loss", c.z_loss, at_least(0), "Factor of the squared log normaliser in the loss.");
  v.field("recompute", c.recompute, one_of({"none", "selective", "full"}),
          "What the backward pass computes again instead of keeping it: nothing; norms and "
          "activations; whole blocks.");
  v.field(
      "deterministic", c.deterministic, any(),
      "Every run gives the same bits on the same type of device. false lets softmax attention's "
      "backward pass on a GPU add up in any order, which is faster.");
  v.field("max_bad_steps", c.max_bad_steps, at_least(1),
          "Steps in a row with a non-finite loss or gradient before the run gives up.");
  v.field("sharding", c.sharding, one_of({"full"}),
          "What is spread over the ranks: everything. There is no other choice while a run has one "
          "rank.");
}

template <class V>
void describe(V& v, SourceConfig& c) {
  v.field("path", c.path, any().needed(), "HDF5 document store, made by `sbtrain prepare`.");
  v.field("weight", c.weight, above(0), "Share of the mixture's tokens, relative to the others.");
}

template <class V>
void describe(V& v, TaskConfig& c) {
  const std::vector<std::string_view> tasks = {"mqar", "mqrar"};
  v.field("type", c.type, one_of({"none", "mqar", "mqrar"}),
          "none: the data comes from files. Multi-query associative recall; or repeated: each "
          "answer gives its key a new value.");
  v.field("pairs", c.pairs, between(1, kMaxSize).when("type", tasks),
          "Pairs of key and value at the start of an example.");
  v.field("query_power", c.query_power, above(0).when("type", {"mqar"}),
          "a of p(g) ~ (g + 1)^(a - 1), which places the queries: slots g near the pairs are the "
          "likelier, the smaller a is.");
  v.field("examples", c.examples, between(1, 1e15).when("type", tasks),
          "Training examples, seen in a new order in each epoch.");
  v.field("eval_examples", c.eval_examples, between(1, 1e15).when("type", tasks),
          "Held-out examples; validation uses all of them.");
}

template <class V>
void describe(V& v, DataConfig& c) {
  v.list("sources", c.sources, any(), "The training mixture.");
  v.field("validation", c.validation, any(), "HDF5 document stores for validation.");
  v.field("tokenizer", c.tokenizer, any(),
          "sentencepiece model, for samples and for bits per byte.");
  v.field("packing", c.packing, one_of({"concat", "best_fit"}),
          "How documents fill sequences: one behind the other, or with the fewest cuts.");
  v.field("predict_across_documents", c.predict_across_documents, any(),
          "The last token of a document predicts the first of the next.");
  v.field("prefetch", c.prefetch, between(1, 4096), "Micro-batches prepared ahead.");
  v.section("task", c.task,
            "A synthetic task in place of files (docs/tasks.md): examples as long as "
            "train.sequence_length over the tokens of model.vocab.");
}

template <class V>
void describe(V& v, ScheduleConfig& c) {
  v.field("type", c.type, one_of({"constant", "linear", "cosine", "power", "wsd", "exponential"}),
          "Course of the learning rate. power: min(train.lr, a B n^b) after n tokens with B "
          "sequences in a batch; exponential: from the previous stage's last rate down.");
  v.field("warmup", c.warmup,
          between(0, kMaxCount).when("type", {"constant", "linear", "cosine", "power", "wsd"}),
          "Linear increase from 0 at the start of the stage.");
  v.field("final_ratio", c.final_ratio,
          between(0, 1).when("type", {"linear", "cosine", "wsd", "exponential"}),
          "Learning rate at the end of the stage, relative to where the decay starts.");
  v.field("decay_fraction", c.decay_fraction, between(0, 1).when("type", {"wsd"}),
          "Part of the stage in which the rate decays.");
  v.field("power_a", c.power_a, above(0).when("type", {"power"}), "a of a B n^b.");
  v.field("power_b", c.power_b, between(-10, 0).when("type", {"power"}), "b of a B n^b.");
  v.field("scale", c.scale, above(0).when("type", {"exponential"}),
          "Factor of the previous stage's last rate at the start.");
}

template <class V>
void describe(V& v, StageConfig& c) {
  v.field("name", c.name, any(), "Name in logs and checkpoints; each stage has its own.");
  v.field("length", c.length, between(1, kMaxCount).needed(), "How long the stage lasts.");
  v.section("schedule", c.schedule, "The stage's segment of the learning rate schedule.");
  v.list("sources", c.sources, any(), "The stage's own mixture; none: data.sources.");
}

template <class V>
void describe(V& v, ValidationConfig& c) {
  v.field("every", c.every, between(0, kMaxCount), "Interval; 0: only at the end.");
  v.field("tokens", c.tokens, at_least(1), "Tokens of validation data used, at most.");
  v.field("stop_accuracy", c.stop_accuracy, between(0, 1),
          "Training ends once a task's held-out accuracy reaches this; 0: never.");
}

template <class V>
void describe(V& v, CheckpointConfig& c) {
  v.field("every", c.every, between(0, kMaxCount), "Interval; 0: only at the end.");
  v.field("keep", c.keep, between(1, 1000000), "Newest checkpoints kept.");
  v.field("async", c.async, any(), "Write in the background; training waits for the copy alone.");
  v.field("resume", c.resume, any(),
          "auto: from the newest good checkpoint in the run folder, if there is one; none; or the "
          "path of a checkpoint.");
  v.field("max_failures", c.max_failures, at_least(1),
          "Failed saves in a row before the run gives up.");
  v.field("allow_changes", c.allow_changes, any(),
          "Keys whose values may differ from those of the run that is resumed, such as "
          "[train.batch]; others of model, seed, batch and data order must be the same.");
}

template <class V>
void describe(V& v, MetricsConfig& c) {
  v.field("every", c.every, at_least(1), "Steps between two records.");
  v.field("jsonl", c.jsonl, any(), "Write metrics.jsonl.");
  v.field("tensorboard", c.tensorboard, any(), "Write TensorBoard event files.");
  v.field("progress", c.progress, any(), "Show progress on the terminal.");
  v.field("peak_tflops", c.peak_tflops, at_least(0),
          "The device's dense peak, for MFU; 0: known devices only.");
}

template <class V>
void describe(V& v, Config& c) {
  v.field("name", c.name, any(), "Name of the run.");
  v.field("out", c.out, any(), "Run folder; empty: a folder of that name in runs/.");
  v.field("seed", c.seed, any(), "Seed of initialisation, data order and sampling.");
  v.field("device", c.device, one_of({"auto", "cpu", "cuda"}),
          "Backend; auto: cuda where there is a GPU.");
  v.section("model", c.model, "The model: Llama 2 layout with a choice of attention.");
  v.section("train", c.train, "Batch, optimizer and memory.");
  v.section("data", c.data, "What the model is trained and validated on.");
  v.list("stages", c.stages, any(),
         "The run, one stage after the other; each has a length, a segment of the schedule and, if "
         "it likes, a mixture of its own.");
  v.section("validation", c.validation, "Loss on held-out data while training.");
  v.section("checkpoint", c.checkpoint, "Saving and resuming.");
  v.section("metrics", c.metrics, "What is recorded of a run.");
}

}  // namespace sbtrain::schema
