// Measures the speed of a training step and of its parts, of attention, of single ops and of
// collectives. All of them run on random numbers and need neither data nor files, but for a step
// that is asked to take the weights and the text of a run.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attention/kept_keys.h"
#include "core/memory.h"
#include "job/control.h"
#include "job/launch.h"
#include "ops/stream_control.h"
#include "parallel/communicator.h"
#include "train/initial_weights.h"
#include "train/run_config.h"

namespace sbtrain {

// ---- A training step --------------------------------------------------------------------------

struct BenchOptions {
  int64_t warmup = 3;
  int64_t steps = 20;
  bool trace = false;  // fill BenchResult::trace
  // Weights; the tokens are then those that a run of the configuration begins with, each step's
  // own. Without them both are random.
  InitFrom init{};
};

struct BenchPart {
  std::string name;                // "matrix products", "attention", ...
  double seconds = 0;              // of one step, mean
  std::vector<double> of_ranks{};  // the same on every rank; empty in a job of one
};

struct BenchResult {
  int64_t tokens_per_step = 0;
  double step_seconds = 0;  // median
  double slowest_seconds = 0;
  double tokens_per_second = 0;  // at the median
  double flops_causal = 0;       // per second, attention counted as the causal half
  double flops_full = 0;         // per second, attention counted as the full square
  double peak_flops = 0;         // per second, of the device; 0: unknown
  size_t memory_bytes = 0;       // planned, with what libraries are known to take
  size_t memory_used = 0;        // taken from the device, libraries included; 0 on the CPU
  size_t host_bytes = 0;         // of the host's memory (train.offload)
  // The first of the timed steps run once more for the parts, with the same weights and tokens, so
  // that measuring the parts does not slow the timed steps. "idle" is the rest of step_seconds. In
  // a job of several ranks `seconds` are rank 0's.
  std::vector<BenchPart> parts;
  // The share of the visible pairs of query and key that attention reads in the steps, of all
  // layers that may skip keys, on rank 0; negative where there are none, and where ranks share
  // sequences. Weights do not change from step to step; on text the share is that of the first
  // micro-batch of the first timed step.
  double keys_read = -1;
  // Of rank 0, in a job of several ranks: what its stream of communication did in a step, most of
  // it beside the parts above, of which "communication" is the rest that they waited for.
  struct Collectives {
    std::string name;    // "all_gather"
    int64_t calls = 0;   // of one step
    double bytes = 0;    // of the whole tensors, all calls
    double seconds = 0;  // from the start on this rank to the end, so waits for other ranks count
    double bus_bytes_per_second = 0;  // what each link carries, as NCCL's tests count it
  };
  std::vector<Collectives> collectives;
  // Of one of the steps that measured the parts: every op of this rank, with its stream and part.
  struct TraceRow {
    std::string stream;  // "compute" or "communication"
    std::string part;    // as in `parts`, or "collective"
    ops::TracedOp op;
  };
  std::vector<TraceRow> trace;
  int world = 1;
};

// Trains on documents of sequence_length random tokens, or on text, with a learning rate of 0:
// where attention skips keys, the weights decide how long a step takes. Every rank of the job calls
// it. Throws ExitCode::kUsage for a trace of a backend other than kCuda, and with options.init what
// load_initial_weights() and Loader throw.
BenchResult bench_step(const Config& config, Backend backend, const BenchOptions& options,
                       const Job& job = {});

// ---- Decoding ---------------------------------------------------------------------------------

struct DecodeBenchOptions {
  std::vector<int64_t> sequences = {1, 8, 64};  // one row each
  int64_t context = 256;                        // tokens of each before the first step
  int64_t warmup = 8;
  int64_t steps = 128;
  bool graph = true;    // on a GPU: steps run by a record (DecodeOptions::recorded)
  bool overlap = true;  // the same: whose kernels begin early (DecodeOptions::overlap)
  KeyDropping dropping{};
};

struct DecodeBenchRow {
  int64_t sequences = 0;
  double step_seconds = 0;  // median; one token for each sequence, drawn at temperature 0
  double prefill_tokens_per_second = 0;
  double weight_bytes = 0;  // that each step reads
  double cache_bytes = 0;   // the same, with every key of the context that is kept
  CacheUse use{};           // where keys are dropped, after the steps
  double copy_rate = 0;     // bytes read and written a second by a copy of as many bytes
  // The memory bound: the time in which a copy moves as many bytes as a step reads.
  double bound_seconds() const { return (weight_bytes + cache_bytes) / copy_rate; }
  std::vector<BenchPart> parts{};  // of a step, op by op and the draw, in separate steps
};

// A model of random weights continues random prompts.
std::vector<DecodeBenchRow> bench_decode(const Config& config, Backend backend,
                                         const DecodeBenchOptions& options);

// ---- Attention --------------------------------------------------------------------------------

// The names of the cases that modules declare for timing (attention/registry.h).
std::vector<std::string> bench_attention_modules();

struct AttentionBenchOptions {
  std::vector<std::string> modules;
  std::vector<int64_t> head_dims;  // empty: suited to the backend; likewise 0 below
  std::vector<int64_t> lengths;
  int64_t tokens = 0;   // of the packed micro-batch, cut into documents of one length, or, if
  bool ragged = false;  // ragged, of lengths around it (a log-normal distribution of that mean)
  int64_t width = 0;    // heads * head_dim
  std::map<std::string, std::string> options;  // new values of options that cases set
  bool deterministic = true;                   // as train.deterministic
  std::string implementation;  // to force on a GPU (ops/choose.h); empty: the chosen one
  int64_t repeats = 20;
};

struct AttentionBenchRow {
  std::string module;
  int64_t head_dim = 0;
  int64_t length = 0;
  double forward_seconds = 0;  // median
  double backward_seconds = 0;
  double forward_flops = 0;  // in one pass
  double backward_flops = 0;
};

// Throws ExitCode::kUsage for sizes that do not divide each other, unknown modules, and options
// that no case sets.
std::vector<AttentionBenchRow> bench_attention(Backend backend, AttentionBenchOptions options);

// ---- Single ops -------------------------------------------------------------------------------

struct OpsBenchOptions {
  int64_t tokens = 0;  // 0: suited to the backend; likewise below
  int64_t width = 0;
  int64_t inner = 0;
  int64_t vocab = 0;
  int64_t repeats = 20;
};

struct OpsBenchRow {
  std::string name;
  double seconds = 0;  // median
  double bytes = 0;    // to read and write, each byte once; 0: not bound by memory
  double flops = 0;    // of a matrix product; 0: none
};

// The first row is the copy that the memory-bound ops are compared with.
std::vector<OpsBenchRow> bench_ops(Backend backend, OpsBenchOptions options);

// ---- Collectives ------------------------------------------------------------------------------

struct CollectivesBenchOptions {
  std::vector<int64_t> mebibytes;   // of the whole tensors; empty: suited to the backend
  std::vector<int64_t> ctas = {0};  // the most thread blocks of a collective; 0: NCCL's choice
  bool copy_engines = false;        // all-gathers by the copy engines too
  int64_t repeats = 20;
};

struct CollectivesBenchRow {
  Collective collective{};
  DType dtype{};
  std::string setting;           // "default", "8 CTAs", "copy engines"
  double bytes = 0;              // of the whole tensor
  double seconds = 0;            // median of a rank, mean of the ranks
  double bus_factor = 0;         // the share of `bytes` that each link must carry
  double beside_seconds = 0;     // while matrix products run on the same device; 0: not measured
  double products_slowdown = 0;  // the products' time meanwhile, relative to their time alone
};

// Called by every rank of the job; returns the same on all of them.
std::vector<CollectivesBenchRow> bench_collectives(Control& control, Backend backend,
                                                   CollectivesBenchOptions options);

}  // namespace sbtrain
