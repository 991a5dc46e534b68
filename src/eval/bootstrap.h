// Intervals for means over documents. Tokens of one document are alike, so that documents, not
// tokens, are what an interval has to draw: the bootstrap of Efron (1979), percentiles.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "eval/windows.h"

namespace sbtrain {

struct Interval {
  double low = 0;
  double high = 0;
};

// What one document adds to a mean over tokens.
struct DocumentSum {
  double sum = 0;
  int64_t tokens = 0;
};

// The 95% interval of sum(sum) / sum(tokens): as many documents as there are, drawn with
// replacement, `resamples` times, always with the same random numbers. None for fewer than two
// documents, or without resamples. With few documents it is too narrow.
std::optional<Interval> bootstrap_interval(std::span<const DocumentSum> documents,
                                           int64_t resamples);

// The interval of the loss.
std::optional<Interval> loss_interval(std::span<const DocumentScore> documents, int64_t resamples);

// The interval of loss `a` - loss `b` on the same targets, which is narrower than those of both:
// a document that is hard for one is hard for the other. Throws ExitCode::kInternal for other
// documents or numbers of tokens.
std::optional<Interval> difference_interval(std::span<const DocumentScore> a,
                                            std::span<const DocumentScore> b, int64_t resamples);

}  // namespace sbtrain
