// Loss of the targets that a model can recall from its context, and of the others: AR and non-AR
// perplexity (arXiv 2312.04927, arXiv 2402.10644).
//
// The context of a target is the part of its document that the model sees: the tokens before it in
// its segment of the batch. A target is AR
//   by token   if it occurs in its context
//   by bigram  if the token before it and the target itself occur in its context as neighbours
#pragma once

#include <span>

#include "data/batch.h"
#include "eval/perplexity.h"

namespace sbtrain {

struct RecallSplit {
  Perplexity recalled;  // AR
  Perplexity other;     // non-AR
  void visit(const auto& f) {
    recalled.visit(f);
    other.visit(f);
  }
};

struct Recall {
  RecallSplit token;
  RecallSplit bigram;
  // Adds the batch's targets; `losses_T` holds the loss (nats) of each.
  void add(const PackedBatch& batch, std::span<const float> losses_T);
  void visit(const auto& f) {
    token.visit(f);
    bigram.visit(f);
  }
};

}  // namespace sbtrain
