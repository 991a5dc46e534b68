// Units of the loss.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "core/number_text.h"

namespace sbtrain {

inline double perplexity(double nats_per_token) {
  return without_nan_sign(std::exp(nats_per_token));
}

// Bits per byte of text, which can be compared between tokenizers; nats per token cannot. `tokens`
// is the number of predicted tokens that the loss is the mean of, `bytes` the UTF-8 length of the
// text that they stand for. NaN if there are no bytes.
inline double bits_per_byte(double nats_per_token, int64_t tokens, int64_t bytes) {
  if (bytes <= 0) return std::numeric_limits<double>::quiet_NaN();
  return nats_per_token / std::numbers::ln2 * static_cast<double>(tokens) /
         static_cast<double>(bytes);
}

}  // namespace sbtrain
