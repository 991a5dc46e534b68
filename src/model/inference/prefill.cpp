#include "model/inference/prefill.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"

namespace sbtrain {
namespace {

// Runs the blocks over the prompt and fills the cache of sequence b; x_TD becomes their output. A
// full cache ends it after the last block, so that no weights stay gathered.
void prefill_blocks(Stream& s, const Transformer& model, ParamAccess& params,
                    const BatchTensors& batch, DecodeCache& cache, int64_t b, Buffer& x_TD) {
  std::optional<CacheFull> full;
  model.forward(s, params, batch, x_TD, model.all_blocks(),
                [&](int64_t l, const Weights&, const std::unique_ptr<AttentionSaved>& saved) {
                  require(saved != nullptr, "prefill needs a model with Recompute::kNone");
                  if (full) return;
                  try {
                    model.block(l).attention().prefill(s, cache.layer(l), b, *saved);
                  } catch (const CacheFull& e) {
                    full = e;
                  }
                });
  if (!full) return;
  model.release_head(params);
  throw CacheFull(*full);
}

}  // namespace

void prefill(Stream& s, const Transformer& model, ParamAccess& params, const BatchTensors& batch,
             DecodeCache& cache, int64_t b, Tensor logits_1V) {
  Buffer x_TD = model.embedding_buffer(s, batch.tokens());
  prefill_blocks(s, model, params, batch, cache, b, x_TD);
  model.project(s, params, x_TD.tensor().row_range(batch.tokens() - 1, 1), logits_1V);
}

void prefill(Stream& s, const Transformer& model, ParamAccess& params, const BatchTensors& batch,
             DecodeCache& cache, int64_t b, Tensor logits_CV, const LogitsVisit& visit) {
  const int64_t T = batch.tokens();
  Buffer x_TD = model.embedding_buffer(s, T);
  prefill_blocks(s, model, params, batch, cache, b, x_TD);
  const Buffer norm_TD = model.final_norm(s, params, x_TD);
  const auto logits = [&](int64_t first, int64_t rows) {
    const Tensor logits_NV = logits_CV.row_range(0, rows);
    model.logits_of(s, params, logits_NV, norm_TD.tensor().row_range(first, rows));
    return logits_NV;
  };
  for (int64_t first = 0; first < T; first += logits_CV.rows()) {
    const int64_t rows = std::min(T - first, logits_CV.rows());
    visit(first, logits(first, rows));
  }
  logits(T - 1, 1);
  model.release_head(params);
}

void PartialPrefill::run_layers(Stream& s, const Transformer& model, ParamAccess& params,
                                int64_t layers) {
  const int64_t begin = layers_run();
  const int64_t end = std::min(begin + layers, model.config().layers);
  if (begin == 0) x_TD_ = model.embedding_buffer(s, tokens());
  model.forward(s, params, batch_, x_TD_, {.begin = begin, .end = end},
                [&](int64_t, const Weights&, std::unique_ptr<AttentionSaved>& saved) {
                  require(saved != nullptr, "prefill needs a model with Recompute::kNone");
                  saved_.push_back(std::move(saved));
                });
  if (end == model.config().layers) model.release_head(params);
}

void PartialPrefill::see_rows(Stream& s, const Transformer& model, ParamAccess& params,
                              int64_t rows, Tensor logits_CV, const LogitsVisit& visit) {
  const int64_t end = std::min(row_ + rows, tokens());
  while (row_ < end) {
    const int64_t n = std::min(end - row_, logits_CV.rows());
    const Tensor logits_NV = logits_CV.row_range(0, n);
    model.gather_head(params);
    model.project(s, params, x_TD_.tensor().row_range(row_, n), logits_NV);
    visit(row_, logits_NV);
    row_ += n;
  }
}

void PartialPrefill::finish(Stream& s, const Transformer& model, ParamAccess& params,
                            DecodeCache& cache, int64_t b, Tensor logits_1V) const {
  for (int64_t l = 0; l < model.config().layers; ++l) {
    model.block(l).attention().prefill(s, cache.layer(l), b, *saved_.at(static_cast<size_t>(l)));
  }
  model.gather_head(params);
  model.project(s, params, x_TD_.tensor().row_range(tokens() - 1, 1), logits_1V);
}

}  // namespace sbtrain
