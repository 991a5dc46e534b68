#include "serve/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "core/philox.h"
#include "ops/cpu/simd.h"

namespace sbtrain {
namespace {

// The tokens by their logits, the likeliest first. They are sorted only as far as they are asked
// for: a draw seldom looks at more than a few of a large vocabulary.
class Ranking {
 public:
  explicit Ranking(std::span<const float> logits) : logits_(logits), tokens_(logits.size()) {
    std::iota(tokens_.begin(), tokens_.end(), 0);
  }
  int32_t at(size_t rank) {
    if (rank >= sorted_) sort_to(rank + 1);
    return tokens_[rank];
  }

 private:
  void sort_to(size_t count) {
    const auto likelier = [&](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    };
    const auto begin = tokens_.begin() + static_cast<ptrdiff_t>(sorted_);
    sorted_ = std::min(tokens_.size(), std::max({count, 2 * sorted_, size_t{32}}));
    const auto end = tokens_.begin() + static_cast<ptrdiff_t>(sorted_);
    if (end != tokens_.end()) std::nth_element(begin, end, tokens_.end(), likelier);
    std::sort(begin, end, likelier);
  }

  std::span<const float> logits_;
  std::vector<int32_t> tokens_;
  size_t sorted_ = 0;
};

// The sum of e^((x_i - top) / temperature).
double sum_of_exponentials(std::span<const float> x, float top, float temperature) {
  constexpr size_t kRun = 1024;  // summed in fp32, and the runs in fp64
  double sum = 0;
  for (size_t begin = 0; begin < x.size(); begin += kRun) {
    const size_t end = std::min(x.size(), begin + kRun);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (size_t i = begin; i < end; ++i) {
      part += ops::cpu::simd::exp((x[i] - top) / temperature);
    }
    sum += part;
  }
  return sum;
}

void check_finite(double value) {
  if (std::isfinite(value)) return;
  fail(ExitCode::kDiverged, "the model's logits are not finite; its weights are damaged");
}

size_t limited(int64_t limit, size_t size) {
  return limit > 0 ? std::min(static_cast<size_t>(limit), size) : size;
}

}  // namespace

void change_logits(const LogitChanges& changes, std::span<float> logits) {
  const auto change = [&](std::span<const int32_t> tokens, const auto& changed) {
    for (const int32_t token : tokens) {
      if (token < 0 || static_cast<size_t>(token) >= logits.size()) continue;
      float& logit = logits[static_cast<size_t>(token)];
      logit = changed(logit);
    }
  };
  const auto penalty = static_cast<float>(changes.repetition_penalty);
  if (changes.repetition_penalty != 1) {
    change(changes.seen, [&](float x) { return x > 0 ? x / penalty : x * penalty; });
  }
  change(changes.banned, [](float) { return std::numeric_limits<float>::lowest(); });
}

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                     uint64_t position) {
  require(!logits.empty(), "sampling from no logits");
  const float* likeliest = std::max_element(logits.data(), logits.data() + logits.size());
  const float top = *likeliest;
  check_finite(top);
  if (options.temperature <= 0) return static_cast<int32_t>(likeliest - logits.data());

  // Below, every token but the likeliest has a probability of 0 in any case.
  const auto temperature = static_cast<float>(std::max(options.temperature, 1e-6));
  const double sum = sum_of_exponentials(logits, top, temperature);
  check_finite(sum);
  Ranking ranking(logits);
  size_t count = limited(options.top_k, logits.size());
  const auto weight = [&](size_t rank) {  // of which the likeliest token has 1
    return static_cast<double>(ops::cpu::simd::exp((logits[ranking.at(rank)] - top) / temperature));
  };
  if (options.min_p > 0) {
    size_t likely = 1;
    while (likely < count && weight(likely) >= options.min_p) ++likely;
    count = likely;
  }
  double total = sum;
  if (count < logits.size()) {
    total = 0;
    for (size_t rank = 0; rank < count; ++rank) total += weight(rank);
  }
  // The first `kept` tokens have `mass` of the total.
  size_t kept = count;
  double mass = total;
  if (options.top_p < 1) {
    for (kept = 0, mass = 0; kept < count && (kept == 0 || mass < options.top_p * total); ++kept) {
      mass += weight(kept);
    }
  }
  double u = Philox(options.seed, RandomPurpose::kSampling, "token").uniform(position) * mass;
  for (size_t rank = 0; rank + 1 < kept; ++rank) {
    u -= weight(rank);
    if (u < 0) return ranking.at(rank);
  }
  // Rounding has left a rest. A token without probability must not get it: it may be a banned one.
  while (kept > 1 && weight(kept - 1) == 0) --kept;
  return ranking.at(kept - 1);
}

TokenLogprob token_logprob(std::span<const float> logits, int32_t token, int64_t top) {
  require(token >= 0 && static_cast<size_t>(token) < logits.size(), "token {} of {}", token,
          logits.size());
  const float largest = *std::max_element(logits.begin(), logits.end());
  const double sum = sum_of_exponentials(logits, largest, 1.0f);
  check_finite(largest);
  check_finite(sum);
  const double log_sum = static_cast<double>(largest) + std::log(sum);
  const auto logprob = [&](int32_t of) {
    // No logarithm of 0 is shown: its JSON would be null.
    return static_cast<float>(std::max(static_cast<double>(logits[of]) - log_sum, -1e30));
  };
  TokenLogprob result{.token = token, .logprob = logprob(token), .top = {}};
  const size_t count = top > 0 ? limited(top, logits.size()) : 0;
  if (count == 1) {
    const auto best = std::max_element(logits.begin(), logits.end());
    const auto id = static_cast<int32_t>(best - logits.begin());
    result.top.emplace_back(id, logprob(id));
  } else if (count > 1) {
    Ranking ranking(logits);
    for (size_t rank = 0; rank < count; ++rank) {
      result.top.emplace_back(ranking.at(rank), logprob(ranking.at(rank)));
    }
  }
  return result;
}

}  // namespace sbtrain
