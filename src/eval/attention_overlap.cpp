#include "eval/attention_overlap.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

// The n keys of the largest weights; of equal weights, the nearest key comes first.
std::vector<int64_t> largest(std::span<const float> row, size_t n) {
  std::vector<int64_t> keys(row.size());
  std::iota(keys.begin(), keys.end(), 0);
  std::partial_sort(
      keys.begin(), keys.begin() + static_cast<int64_t>(n), keys.end(),
      [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a > b; });
  keys.resize(n);
  return keys;
}

}  // namespace

double AttentionOverlap::Ratio::value() const {
  return all > 0 ? intersection / all : std::numeric_limits<double>::quiet_NaN();
}

double AttentionOverlap::top() const {
  return top_.value();
}
double AttentionOverlap::threshold() const {
  return above_.value();
}
double AttentionOverlap::soft() const {
  return soft_.value();
}
double AttentionOverlap::mass() const {
  return queries_ > 0 ? mass_ / static_cast<double>(queries_)
                      : std::numeric_limits<double>::quiet_NaN();
}

void AttentionOverlap::add(const AttentionMap& map, std::span<const TruePosition> positions) {
  std::map<int64_t, std::vector<bool>> truth;  // of each query, by key
  for (const auto& [query, key] : positions) {
    if (key < 0 || key > query || query >= map.tokens) {
      fail(ExitCode::kData, "true position: query {} and key {} of {} tokens", query, key,
           map.tokens);
    }
    std::vector<bool>& keys = truth[query];
    keys.resize(static_cast<size_t>(query) + 1);
    keys[static_cast<size_t>(key)] = true;
  }
  for (const auto& [query, is_true] : truth) {
    const std::span<const float> row(map.weights_TT.data() + query * map.tokens, is_true.size());
    const auto true_keys = static_cast<size_t>(std::count(is_true.begin(), is_true.end(), true));
    double hits = 0;
    for (const int64_t key : largest(row, true_keys)) hits += is_true[static_cast<size_t>(key)];
    top_.intersection += hits;
    top_.all += 2.0 * static_cast<double>(true_keys) - hits;
    for (size_t key = 0; key < row.size(); ++key) {
      const double weight = row[key];
      const double target = is_true[key] ? 1.0 : 0.0;
      const bool above = weight > threshold_;
      above_.intersection += above && is_true[key];
      above_.all += above || is_true[key];
      soft_.intersection += std::min(weight, target);
      soft_.all += std::max(weight, target);
      mass_ += weight * target;
    }
    ++queries_;
  }
}

}  // namespace sbtrain
