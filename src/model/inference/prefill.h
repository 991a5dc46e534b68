// Prompts: the forward pass that fills the cache of a sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "model/inference/decode_cache.h"
#include "model/transformer.h"

namespace sbtrain {

// Runs the one document of `batch` as the prompt of sequence b; logits_1V are those of the token
// that follows the prompt.
void prefill(Stream& s, const Transformer& model, ParamAccess& params, const BatchTensors& batch,
             DecodeCache& cache, int64_t b, Tensor logits_1V);

// The same, and visit(first, logits_NV) sees the logits of the prompt's tokens [first, first + N),
// from the first to the last, N of at most C at once: rows of logits_CV, whose row 0 is then that
// of the token that follows the prompt.
using LogitsVisit = std::function<void(int64_t first, const Tensor& logits_NV)>;
void prefill(Stream& s, const Transformer& model, ParamAccess& params, const BatchTensors& batch,
             DecodeCache& cache, int64_t b, Tensor logits_CV, const LogitsVisit& visit);

// A prompt that runs a few layers at a time, between which the model may do other work: all of its
// tokens go through one layer after the other, so that the results have the bits of prefill().
class PartialPrefill {
 public:
  PartialPrefill() = default;
  explicit PartialPrefill(const BatchTensors& batch) : batch_(batch) {}  // one document

  int64_t tokens() const { return batch_.tokens(); }
  int64_t layers_run() const { return static_cast<int64_t>(saved_.size()); }
  int64_t rows_seen() const { return row_; }

  // Runs up to `layers` more of the blocks.
  void run_layers(Stream& s, const Transformer& model, ParamAccess& params, int64_t layers);
  // After the last block: visit(first, logits_NV) for up to `rows` more tokens, as prefill() does.
  void see_rows(Stream& s, const Transformer& model, ParamAccess& params, int64_t rows,
                Tensor logits_CV, const LogitsVisit& visit);
  // After the last block: fills the cache of sequence b; logits_1V are those of the token that
  // follows the prompt.
  void finish(Stream& s, const Transformer& model, ParamAccess& params, DecodeCache& cache,
              int64_t b, Tensor logits_1V) const;

 private:
  BatchTensors batch_;
  Buffer x_TD_;  // the input of the next block, or the last one's output
  // Of the blocks that have run. The cache is filled in the end only, because decode steps write to
  // the parts of all sequences.
  std::vector<std::unique_ptr<AttentionSaved>> saved_;
  int64_t row_ = 0;  // the first token whose logits have not been seen
};

}  // namespace sbtrain
