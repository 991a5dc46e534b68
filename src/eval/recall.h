// Loss where a model can recall from its context, and where it cannot: AR and non-AR perplexity
// (arXiv 2312.04927, arXiv 2402.10644).
//
// The context of a target is what the model sees of its document: the tokens of its segment of the
// batch. A target is AR
//   by token   if it occurs in its context
//   by bigram  if it and the token before it stand side by side in its context already
#pragma once

#include <span>

#include "data/batch.h"
#include "eval/perplexity.h"

namespace sbtrain {

struct RecallSplit {
  Perplexity recalled;  // AR
  Perplexity other;     // non-AR
};

struct Recall {
  RecallSplit token;
  RecallSplit bigram;
  // Adds the batch's targets; `losses_T` holds the loss (nats) of each.
  void add(const PackedBatch& batch, std::span<const float> losses_T);
};

}  // namespace sbtrain
