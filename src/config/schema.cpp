// The schema: every key of a configuration, with its rules and its help.
#include "config/fields.h"
#include "train/run_config.h"

namespace sbtrain {

void describe(Fields& f, ModelConfig& c) {
  f.add("layers", c.layers, between(1, 10000), "Transformer blocks.");
  f.add("width", c.width, between(1, kMaxSize), "Model width D.");
  f.add("inner", c.inner, between(1, kMaxSize), "Inner width F of the MLP.");
  f.add("heads", c.heads, between(1, kMaxSize), "Attention heads H.");
  f.add("kv_heads", c.kv_heads, between(0, kMaxSize),
        "Heads of keys and values (grouped-query attention, arXiv 2305.13245): each serves heads / "
        "kv_heads heads of queries that follow each other; 0: as many as `heads`.");
  f.add("head_dim", c.head_dim, between(0, kMaxSize),
        "Channels of a head; 0: width / heads. Another size makes the projections of attention "
        "narrower or wider than the model: the output projection is width x (heads x head_dim).");
  f.add("vocab", c.vocab, between(2, kMaxSize),
        "Vocabulary size V; the tokenizer of the data must not have more.");
  f.add("tied", c.tied, "The output head shares the embedding's weights.");
  f.add("norm", c.norm, "Normalisation of each sublayer, attention and MLP.");
  f.add("norm_position", c.norm_position,
        "Where it stands: at a sublayer's input (Llama), or at its output, before that is added to "
        "the residual stream (OLMo 2).");
  Rule epsilon = from_to_below(0, 1);
  epsilon.above_min = true;
  f.add("norm_eps", c.norm_eps, epsilon, "Epsilon of the normalisation.");
  f.add("mlp", c.mlp,
        "The second half of a block: SwiGLU; GELU with biases, exact or in the tanh form of GPT-2; "
        "or none, which adds the normalised input to the residual stream.");
  f.add("parallel_residual", c.parallel_residual,
        "The MLP reads the input of the block, as attention does, and both are added to it "
        "(GPT-NeoX); otherwise the MLP reads the sum after attention.");
  f.add("position", c.position,
        "What is added to the embedding: nothing, or a learned vector for each position.");
  f.add("max_positions", c.max_positions, between(0, kMaxSize).when("position", {"learned"}),
        "Learned positions: the longest document that the model takes.");
  f.add("init_std", c.init_std, above(0),
        "Standard deviation of initial matrices; projections into the residual stream have "
        "it divided by sqrt(2 layers).");
  f.add("embedding_multiplier", c.embedding_multiplier, above(0),
        "Factor of the embedding's output (muP; arXiv 2408.13359 uses 12).");
  f.add("residual_multiplier", c.residual_multiplier, above(0),
        "Factor of what each sublayer adds to the residual stream (muP; 0.22 there).");
  f.add("logits_multiplier", c.logits_multiplier, above(0), "Factor of the logits (muP).");
  f.add("matrix_lr_factor", c.matrix_lr_factor, above(0),
        "Factor of the learning rate of the matrices in blocks (muP; 256 / width there).");
  f.add("embedding_init_std", c.embedding_init_std, at_least(0),
        "Standard deviation of the initial embedding, head and learned positions; 0: init_std.");
  Rule attention;
  attention.single = true;
  f.list("attention", c.attention, attention,
         "The attention module. A list of them (model.attention.0.type, ...) is repeated over the "
         "layers: its length divides `layers`.");
}

void describe(Fields& f, TrainConfig& c) {
  f.add("sequence_length", c.sequence_length, between(1, kMaxSize),
        "Tokens in one training sequence (L).");
  f.add("micro_batch", c.micro_batch, between(1, kMaxSize),
        "Sequences in one forward and backward pass.");
  f.add("batch", c.batch, between(1, kMaxSize),
        "Sequences in one optimizer step, all ranks together; a multiple of micro_batch.");
  f.add("lr", c.lr, at_least(0), "Peak learning rate.");
  describe(f, c.optimizer);
  f.add("weight_decay", c.weight_decay, at_least(0), "Decoupled weight decay, of matrices only.");
  f.add("ema", c.ema, from_to_below(0, 1),
        "Decay of a running average of the weights, which is kept beside them: after each update "
        "average = ema average + (1 - ema) weights. 0: none. `eval --ema` and `export --ema` use "
        "it. It can be turned on for an old run, where it begins with the weights.");
  f.add("clip", c.clip, at_least(0), "Largest global gradient norm; 0 turns clipping off.");
  f.add("z_loss", c.z_loss, at_least(0), "Factor of the squared log normaliser in the loss.");
  f.add("recompute", c.recompute,
        "What the backward pass computes again instead of keeping it: nothing; norms and "
        "activations; whole blocks.");
  f.add("offload", c.offload,
        "What goes to the host's memory and comes back before its use. activations: the inputs of "
        "all blocks but the last, between their forward and their backward pass: with recompute "
        "full, nearly all that is kept for the backward pass (docs/long_context.md). It changes no "
        "result; on a GPU that memory is page-locked, and copies run beside the computation.");
  f.add("precision", c.precision,
        "What the products of the blocks' linear layers take. bf16: what activations are held in, "
        "which is bf16 on a GPU and f32 on the CPU. fp8: inputs and weights in e4m3 and gradients "
        "in e5m2, with one scale a matrix from its largest element now, where the number of "
        "tokens and both sizes of a matrix are multiples of 16; embedding, head, norms and "
        "attention stay as they are. On a GPU of compute capability 8.9 or newer; the CPU "
        "emulates it (docs/precision.md). auto: the faster of the two, as the first start of the "
        "run times them; the run keeps to it.");
  f.add("deterministic", c.deterministic,
        "Every run gives the same bits on the same type of device. false lets softmax attention's "
        "backward pass on a GPU add up in any order, which is faster.");
  f.add("max_bad_steps", c.max_bad_steps, at_least(1),
        "Skipped steps in a row, for a non-finite loss or gradient or a loss spike, before the run "
        "gives up.");
  f.add("spike_sigma", c.spike_sigma, at_least(0),
        "A step whose loss is above the running mean by more than this many standard deviations is "
        "skipped; 0: none is. 6 is cautious.");
  f.add("spike_window", c.spike_window, between(2, 1000000000),
        "Applied steps that the running mean and deviation of the loss cover. The first "
        "of a stage, as many as this, are only measured: no spike is found among them.");
  f.add(
      "gpus", c.gpus,
      "GPUs of this machine to train on, with one process each: auto, as many of the visible ones "
      "as can share `batch`; or how many. Under a launcher (docs/distributed.md), the number of "
      "its ranks on a machine.");
  f.add("timeout", c.timeout, between(1, 1e6),
        "Seconds without progress after which the ranks of a job give up, and name the rank that "
        "they wait for.");
  f.add("rendezvous_timeout", c.rendezvous_timeout, between(1, 1e6),
        "Seconds that the ranks of a job wait at the start for those that have not come yet.");
  f.add(
      "sharding", c.sharding,
      "What is spread over the ranks. full: weights, gradients and moments, gathered for each use "
      "(ZeRO-3); grad: gradients and moments, while the weights stay whole (ZeRO-2); none: "
      "nothing, "
      "every rank holds a copy; hybrid: full within a node, copies across nodes.");
  f.add("context_parallel", c.context_parallel, between(1, 1024),
        "Ranks that share every sequence, each with a part of its tokens (docs/long_context.md); "
        "they must divide the number of ranks. 1: every rank has whole sequences.");
  f.add(
      "context_layout", c.context_layout,
      "Which tokens of a micro-batch each of the ranks that share it holds. consecutive: one part; "
      "folded: two half parts, as far from the beginning as from the end, so that all read the "
      "same number of keys; each then holds the keys of all while a layer is computed. auto: "
      "folded where it shares the work more evenly (docs/long_context.md).");
  f.add("reduce_dtype", c.reduce_dtype,
        "The type in which gradients are added up across ranks. bfloat16 halves the traffic and "
        "rounds each sum.");
  f.add(
      "gather_engine", c.gather_engine,
      "What gathers weights between GPUs. copy_engines leaves the multiprocessors to the matrix "
      "products; it works among GPUs that NVLink connects, and takes memory in which they reach "
      "each other (NCCL's symmetric windows). auto: copy_engines where all ranks have GPUs of one "
      "machine that NVLink connects.");
  f.add(
      "reduce_engine", c.reduce_engine,
      "What adds up gradients between GPUs. With copy_engines every rank fetches its part of the "
      "others' gradients by the copy engines, while the next block computes, and then adds them in "
      "the order of ranks and in float32; that takes the memory of one more block's gradients. It "
      "needs gather_engine copy_engines. auto: as the weights.");
  f.add("cuda_graph", c.cuda_graph,
        "Records the work of a micro-batch once and gives it to the GPU as a whole, for small "
        "models, where giving kernels one by one takes longer than they run. For one GPU; auto: "
        "there, if a micro-batch takes less than 1e12 floating-point operations.");
}

void describe(Fields& f, SourceConfig& c) {
  f.add("path", c.path, Rule{}.needed(), "HDF5 document store, made by `sbtrain prepare`.");
  f.add("weight", c.weight, above(0), "Share of the mixture's tokens, relative to the others.");
}

void describe(Fields& f, TaskConfig& c) {
  const std::vector<std::string_view> tasks = {"mqar", "mqrar"};
  f.add("type", c.type,
        "none: the data comes from files. Multi-query associative recall; or repeated: each "
        "answer gives its key a new value.");
  f.add("pairs", c.pairs, between(1, kMaxSize).when("type", tasks),
        "Pairs of key and value at the start of an example.");
  f.add("query_power", c.query_power, above(0).when("type", {"mqar"}),
        "a of p(g) ~ (g + 1)^(a - 1), which places the queries: slots g near the pairs are the "
        "likelier, the smaller a is.");
  f.add("examples", c.examples, between(1, 1e15).when("type", tasks),
        "Training examples, seen in a new order in each epoch.");
  f.add("eval_examples", c.eval_examples, between(1, 1e15).when("type", tasks),
        "Held-out examples; validation uses all of them.");
}

void describe(Fields& f, DataConfig& c) {
  f.list("sources", c.sources, Rule{}, "The training mixture.");
  f.add("validation", c.validation, "HDF5 document stores for validation.");
  f.add("tokenizer", c.tokenizer, "Tokenizer of the data, for samples and for bits per byte.");
  f.add("packing", c.packing,
        "How documents fill sequences: one behind the other, or with the fewest cuts.");
  f.add(
      "predict_across_documents", c.predict_across_documents,
      "The last token of a document predicts the first of the document that is packed behind it.");
  f.add("prefetch", c.prefetch, between(1, 4096), "Micro-batches prepared ahead.");
  f.section("task", c.task,
            "A synthetic task in place of files (docs/tasks.md): examples as long as "
            "train.sequence_length over the tokens of model.vocab.");
}

void describe(Fields& f, ScheduleConfig& c) {
  f.add("type", c.type,
        "Course of the learning rate. power: min(train.lr, a B n^b) after n tokens with B "
        "sequences in a batch; exponential: from the previous stage's last rate down.");
  f.add("warmup", c.warmup,
        between(0, kMaxCount).when("type", {"constant", "linear", "cosine", "power", "wsd"}),
        "Linear increase from 0 at the start of the stage.");
  f.add("final_ratio", c.final_ratio,
        between(0, 1).when("type", {"linear", "cosine", "wsd", "exponential"}),
        "Learning rate at the end of the stage, relative to where the decay starts.");
  f.add("decay_fraction", c.decay_fraction, between(0, 1).when("type", {"wsd"}),
        "Part of the stage in which the rate decays.");
  f.add("power_a", c.power_a, above(0).when("type", {"power"}), "a of a B n^b.");
  f.add("power_b", c.power_b, between(-10, 0).when("type", {"power"}), "b of a B n^b.");
  f.add("scale", c.scale, above(0).when("type", {"exponential"}),
        "Factor of the previous stage's last rate at the start.");
}

void describe(Fields& f, StageConfig& c) {
  f.add("name", c.name, "Name in logs and checkpoints; each stage has its own.");
  f.add("length", c.length, between(1, kMaxCount).needed(), "How long the stage lasts.");
  f.section("schedule", c.schedule, "The stage's segment of the learning rate schedule.");
  f.list("sources", c.sources, Rule{}, "The stage's own mixture; none: data.sources.");
}

void describe(Fields& f, ValidationConfig& c) {
  f.add("every", c.every, between(0, kMaxCount), "Interval; 0: only at the end.");
  f.add("tokens", c.tokens, between(1, kMaxCount), "Tokens of validation data used, at most.");
  f.add("stop_accuracy", c.stop_accuracy, between(0, 1),
        "Training ends once a task's held-out accuracy reaches this; 0: never.");
}

void describe(Fields& f, CheckpointConfig& c) {
  f.add("every", c.every, between(0, kMaxCount), "Interval; 0: only at the end.");
  f.add("keep", c.keep, between(1, 1000000),
        "Newest checkpoints kept. The newest one that is known to be good is kept as well.");
  f.add("async", c.async, "Write in the background; training waits for the copy alone.");
  f.add(
      "resume", c.resume,
      "Where a start begins. auto: at the newest checkpoint in the run folder, if there is one; "
      "last-good: at the newest one from which a step has been applied since; a step: at the run's "
      "checkpoint of that step; none: anew; or the path of a checkpoint. The same command started "
      "again continues what its first start began.");
  f.add("max_failures", c.max_failures, at_least(1),
        "Failed saves in a row before the run gives up.");
  f.add("allow_changes", c.allow_changes,
        "Keys whose values may differ from those of the run that is resumed, such as "
        "[train.batch]; others of model, seed, batch and data order must be the same. The message "
        "that refuses a change gives its name. A name that no key has is an error.");
}

void describe(Fields& f, MetricsConfig& c) {
  f.add("every", c.every, at_least(1), "Steps between two records.");
  f.add("jsonl", c.jsonl, "Write metrics.jsonl.");
  f.add("tensorboard", c.tensorboard, "Write TensorBoard event files.");
  f.add("progress", c.progress, "Show progress on the terminal.");
  f.add("peak_tflops", c.peak_tflops, at_least(0),
        "The device's dense peak, for MFU; 0: known devices only.");
}

void describe(Fields& f, MachineConfig& c) {
  constexpr double kLeast = 1e-3;
  constexpr double kMost = 1e9;
  f.add("mfu", c.mfu, between(kLeast, 1),
        "Model FLOPs utilisation of a GPU in the forward and backward pass, without the update "
        "(causal half), which `sbtrain bench train` measures on one.");
  f.add("nvlink_gbs", c.nvlink_gbs, between(kLeast, kMost),
        "GB/s that a ring carries inside a node: the column bus of `sbtrain bench collectives`.");
  f.add("network_gbs", c.network_gbs, between(kLeast, kMost), "GB/s of each GPU's network port.");
  f.add("latency_us", c.latency_us, between(0, kMost),
        "Microseconds of a collective before its first byte.");
  f.add("hop_us", c.hop_us, between(0, kMost), "Microseconds from one GPU to the next in a node.");
  f.add("network_hop_us", c.network_hop_us, between(0, kMost),
        "Microseconds from one node to the next.");
  f.add("memory_gbs", c.memory_gbs, between(kLeast, kMost), "GB/s of a GPU's memory.");
  f.add("memory_gib", c.memory_gib, between(kLeast, kMost), "GiB of a GPU's memory.");
  f.add("reserve_gib", c.reserve_gib, between(0, kMost),
        "GiB of it that a plan leaves free, for other programs and for newer versions of CUDA, "
        "which may take more.");
  f.add("stretch", c.stretch, between(1, kMost),
        "How many times as long a collective inside a node takes beside matrix products.");
  f.add("interference", c.interference, between(0, 1),
        "The share of that time that the products lose.");
  f.add("spread", c.spread, between(0, 1),
        "By how much the slowest of several GPUs is slower than the one that mfu was measured on, "
        "where the copy engines move weights and gradients, which take nothing from the products.");
}

void describe(Fields& f, Config& c) {
  f.add("name", c.name, "Name of the run.");
  f.add("out", c.out, "Run folder; empty: a folder of that name in runs/.");
  f.add("seed", c.seed, "Seed of initialisation, data order and sampling.");
  f.add("device", c.device, "Backend; auto: cuda where there is a GPU.");
  f.section("model", c.model, "The model: Llama 2 layout with a choice of attention.");
  f.section("train", c.train, "Batch, optimizer and memory.");
  f.section("data", c.data, "What the model is trained and validated on.");
  f.list("stages", c.stages, Rule{},
         "The run, one stage after the other; each has a length, a segment of the schedule and, if "
         "it likes, a mixture of its own.");
  f.section("validation", c.validation, "Loss on held-out data while training.");
  f.section("checkpoint", c.checkpoint, "Saving and resuming.");
  f.section("metrics", c.metrics, "What is recorded of a run.");
  f.section("machine", c.machine,
            "The machines that `train --dry-run` plans for, and most of it for `--world`; training "
            "ignores it.");
}

}  // namespace sbtrain
