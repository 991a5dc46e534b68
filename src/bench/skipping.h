// What it saves to skip the keys that stick-breaking attention no longer reaches, measured on
// trained weights and real text (arXiv 2410.17980, "block skipping"), and beside it the time and
// the loss of models whose attention skips nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/backend.h"
#include "eval/perplexity.h"
#include "train/run_config.h"

namespace sbtrain {

struct SkippingBenchOptions {
  std::vector<int64_t> lengths;  // of the windows; no window of another length is read
  // Values of skip_epsilon for all layers. 0, which the losses are compared with, is always
  // measured, and alone for a model that has no such option.
  std::vector<double> epsilons;
  int64_t tokens = 0;   // of a batch, which holds at least one window
  int64_t batches = 4;  // of each length at most, spread over the text
  int64_t repeats = 5;  // rounds over all batches that are timed
};

struct SkippingBenchRow {
  int64_t length = 0;
  double epsilon = 0;
  int64_t windows = 0;       // of all batches
  int64_t batch_tokens = 0;  // of one batch
  // The share of the visible pairs of query and key that the forward pass reads, and the backward
  // pass again: of all layers, and of each. NaN for a model that never skips.
  double keys_read = 0;
  std::vector<double> keys_read_by_layer{};  // NaN for a layer that never skips
  double loss = 0;                           // nats per token
  // Seconds for one batch: attention in all layers without its projections, if it is stick-breaking
  // or softmax, CoCA without its transforms (mean; 0 of other modules), and the model forward with
  // its loss, and forward and backward (medians).
  double attention_forward = 0;
  double attention_backward = 0;
  double model_forward = 0;
  double model_training = 0;
};

// Rows of a length are in the order of their epsilons, the first of which is 0. `text` names the
// document stores and their tokenizer. Throws ExitCode::kUsage for a length that no document has.
std::vector<SkippingBenchRow> bench_skipping(const CheckpointReader& checkpoint,
                                             const Config& config, Backend backend,
                                             const HeldOutOptions& text,
                                             SkippingBenchOptions options);

}  // namespace sbtrain
